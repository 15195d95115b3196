"""What stands behind the module paths that oMLX's servers import. Nothing in here is public."""
