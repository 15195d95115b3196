# The C++ library, free of Python. Its objects are compiled once; the shared library exports the public headers and
# what the bindings need, while the tests link the objects to reach what is private.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

configure_file(csrc/include/prefixcache/version.h.in "${PROJECT_BINARY_DIR}/include/prefixcache/version.h" @ONLY)
include(PrefixcacheKernels)

file(GLOB PREFIXCACHE_SOURCES CONFIGURE_DEPENDS
  csrc/arrays/*.cpp csrc/hash/*.cpp csrc/layout/*.cpp csrc/env/*.cpp csrc/gather/*.cpp csrc/store/*.cpp)
add_library(prefixcache_objects OBJECT ${PREFIXCACHE_SOURCES})
target_include_directories(prefixcache_objects
  PUBLIC "${PROJECT_SOURCE_DIR}/csrc/include" "${PROJECT_BINARY_DIR}/include" "${PROJECT_SOURCE_DIR}/csrc")
# Third-party headers are system headers: their warnings are not ours.
target_include_directories(prefixcache_objects SYSTEM PRIVATE "${XXHASH_INCLUDE_DIR}")
target_link_libraries(prefixcache_objects PUBLIC mlx Threads::Threads)
if(NOT APPLE)
  target_link_libraries(prefixcache_objects PRIVATE OpenSSL::Crypto)
endif()
target_compile_options(prefixcache_objects PRIVATE -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 and 13 warn of overlaps and lengths in string concatenations that cannot be.
  target_compile_options(prefixcache_objects PRIVATE -Wno-restrict -Wno-stringop-overflow)
endif()
# Half of the compiler's time went into the same headers. Each source names what it needs all the same:
# CMAKE_DISABLE_PRECOMPILE_HEADERS builds without, as scripts/sanitize does once.
target_precompile_headers(prefixcache_objects PRIVATE
  <algorithm> <array> <atomic> <chrono> <cstdint> <functional> <memory> <mutex> <span> <stdexcept> <string>
  <string_view> <unordered_map> <vector> <mlx/array.h>)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # Chosen at run time, by a file of its own, where the processor has it.
  set_source_files_properties(csrc/hash/checksum_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx2" SKIP_PRECOMPILE_HEADERS ON)
endif()
if(PREFIXCACHE_SANITIZE)
  target_compile_options(prefixcache_objects PUBLIC
    -fsanitize=${PREFIXCACHE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g)
  target_link_options(prefixcache_objects PUBLIC -fsanitize=${PREFIXCACHE_SANITIZE})
endif()

add_library(prefixcache SHARED $<TARGET_OBJECTS:prefixcache_objects>)
add_library(prefixcache::prefixcache ALIAS prefixcache)
target_include_directories(prefixcache PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include>
  $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
  $<INSTALL_INTERFACE:include>)
target_compile_features(prefixcache PUBLIC cxx_std_20)
target_link_libraries(prefixcache PUBLIC mlx PRIVATE Threads::Threads)
if(NOT APPLE)
  # The LAPACK in MLX 0.31's wheel finds its libraries through libmlx when a program starts; the linker does not.
  target_link_options(prefixcache_objects INTERFACE LINKER:--allow-shlib-undefined)
  target_link_options(prefixcache INTERFACE LINKER:--allow-shlib-undefined)
endif()
if(NOT APPLE)
  target_link_libraries(prefixcache PRIVATE OpenSSL::Crypto)
endif()
if(PREFIXCACHE_SANITIZE)
  target_link_options(prefixcache PUBLIC -fsanitize=${PREFIXCACHE_SANITIZE})
endif()
if(APPLE)
  set(_origin "@loader_path")
else()
  set(_origin "$ORIGIN")
endif()
set_target_properties(prefixcache PROPERTIES INSTALL_RPATH "${_origin}/../../mlx/lib")
if(PREFIXCACHE_INPLACE)
  set_target_properties(prefixcache PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/python/prefixcache/lib")
endif()

# The package for embedders: python -m prefixcache --cmake-dir prints where it lies.
install(TARGETS prefixcache EXPORT prefixcacheTargets LIBRARY DESTINATION lib)
install(DIRECTORY csrc/include/prefixcache DESTINATION include FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_BINARY_DIR}/include/prefixcache/version.h" DESTINATION include/prefixcache)
install(EXPORT prefixcacheTargets NAMESPACE prefixcache:: DESTINATION share/cmake/prefixcache)
configure_package_config_file(cmake/prefixcacheConfig.cmake.in
  "${PROJECT_BINARY_DIR}/prefixcacheConfig.cmake" INSTALL_DESTINATION share/cmake/prefixcache)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/prefixcacheConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/prefixcacheConfig.cmake" "${PROJECT_BINARY_DIR}/prefixcacheConfigVersion.cmake"
  DESTINATION share/cmake/prefixcache)
