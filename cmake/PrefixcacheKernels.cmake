# The kernels' text, embedded: each wrapper with gather_blocks.h in the place of its include.
# As a script: cmake -DPROJECT_SOURCE_DIR=<here> -DPROJECT_BINARY_DIR=<there> -P cmake/PrefixcacheKernels.cmake
set(_kernels "${PROJECT_SOURCE_DIR}/metal")
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${_kernels}/gather_blocks.h" "${_kernels}/gather_blocks.metal" "${_kernels}/gather_blocks.cu")
endif()
file(READ "${_kernels}/gather_blocks.h" _body)
file(READ "${_kernels}/gather_blocks.metal" GATHER_BLOCKS_METAL)
file(READ "${_kernels}/gather_blocks.cu" GATHER_BLOCKS_CUDA)
foreach(_wrapper IN ITEMS GATHER_BLOCKS_METAL GATHER_BLOCKS_CUDA)
  string(REPLACE "#include \"gather_blocks.h\"\n" "${_body}" ${_wrapper} "${${_wrapper}}")
endforeach()
configure_file("${PROJECT_SOURCE_DIR}/csrc/gather/kernel_text.h.in"
  "${PROJECT_BINARY_DIR}/include/gather/kernel_text.h" @ONLY)
