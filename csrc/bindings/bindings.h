// bindings.h: one function for each public header's bindings; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace prefixcache::bindings {

void init_block_hash(nanobind::module_& m);
void init_block_store(nanobind::module_& m);
void init_part_files(nanobind::module_& m);

}  // namespace prefixcache::bindings
