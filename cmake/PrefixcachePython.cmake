# The nanobind module over the library: one source file a public header.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
if(_failed)
  message(FATAL_ERROR "nanobind is missing from ${Python_EXECUTABLE}: pip install the release that MLX was built with")
endif()
find_package(nanobind CONFIG REQUIRED)

# Another nanobind than MLX's would build, and then refuse every array.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/mlx-lines.json")
file(READ "${PROJECT_SOURCE_DIR}/mlx-lines.json" _table)
string(JSON _nanobind ERROR_VARIABLE _unknown GET "${_table}" "${PREFIXCACHE_MLX_VERSION}" nanobind)
if(_unknown)
  message(FATAL_ERROR
    "MLX ${PREFIXCACHE_MLX_VERSION} is not in mlx-lines.json: add it with the nanobind that it was built with")
elseif(NOT nanobind_VERSION VERSION_EQUAL _nanobind)
  message(FATAL_ERROR
    "MLX ${PREFIXCACHE_MLX_VERSION} was built with nanobind ${_nanobind}, but ${nanobind_VERSION} is installed: "
    "pip install nanobind==${_nanobind}")
endif()

file(GLOB PREFIXCACHE_BINDINGS CONFIGURE_DEPENDS csrc/bindings/*.cpp)
# The domain is MLX's, so that both modules see one type for arrays.
nanobind_add_module(_core NB_STATIC LTO NB_DOMAIN mlx ${PREFIXCACHE_BINDINGS})
target_include_directories(_core PRIVATE csrc)
target_link_libraries(_core PRIVATE prefixcache)
target_compile_options(_core PRIVATE -Wall -Wextra)
# The same headers once, as in the library; nanobind's own sources in one piece, as its nb_combined.cpp has them.
target_precompile_headers(_core PRIVATE
  <functional> <memory> <string> <string_view> <vector> <mlx/array.h> <nanobind/nanobind.h>
  <nanobind/stl/optional.h> <nanobind/stl/string.h> <nanobind/stl/string_view.h> <nanobind/stl/vector.h>)
set_target_properties(nanobind-static PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
set_target_properties(_core PROPERTIES INSTALL_RPATH "${_origin}/lib;${_origin}/../mlx/lib")

file(WRITE "${PROJECT_BINARY_DIR}/_build_info.py"
  "# Written by the build.\nMLX_VERSION = \"${PREFIXCACHE_MLX_VERSION}\"\nVERSION = \"${PROJECT_VERSION}\"\n")
if(PREFIXCACHE_INPLACE)
  set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/python/prefixcache")
  configure_file("${PROJECT_BINARY_DIR}/_build_info.py" "${PROJECT_SOURCE_DIR}/python/prefixcache/_build_info.py" COPYONLY)
endif()
install(TARGETS _core LIBRARY DESTINATION .)
install(FILES "${PROJECT_BINARY_DIR}/_build_info.py" DESTINATION .)
