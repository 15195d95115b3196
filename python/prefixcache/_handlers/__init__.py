"""One module for each family of cache classes: ``describe`` a live cache, ``rebuild`` one that stands at n tokens."""
