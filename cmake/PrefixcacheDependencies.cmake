# Finds what the library stands on. Each is asked for by the name a person can install.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)

# MLX ships its CMake files inside its wheel.
if(NOT MLX_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m mlx --cmake-dir
    OUTPUT_VARIABLE MLX_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
  if(_failed)
    message(FATAL_ERROR "MLX is missing from ${Python_EXECUTABLE}: pip install 'mlx[cpu]' (Linux) or mlx (macOS)")
  endif()
endif()
find_package(MLX CONFIG REQUIRED PATHS "${MLX_DIR}" NO_DEFAULT_PATH)
file(STRINGS "${MLX_INCLUDE_DIRS}/mlx/version.h" _lines REGEX "define MLX_VERSION_(MAJOR|MINOR|PATCH)")
string(REGEX REPLACE "[^0-9;]" "" _numbers "${_lines}")
string(REPLACE ";" "." PREFIXCACHE_MLX_VERSION "${_numbers}")
message(STATUS "MLX ${PREFIXCACHE_MLX_VERSION} at ${MLX_DIR}")

find_path(XXHASH_INCLUDE_DIR xxhash.h)
if(NOT XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR "xxhash.h is missing: apt-get install libxxhash-dev (Debian) or brew install xxhash (macOS)")
endif()

find_package(Threads REQUIRED)
if(NOT APPLE)
  find_package(OpenSSL COMPONENTS Crypto)
  if(NOT OpenSSL_FOUND)
    message(FATAL_ERROR "OpenSSL is missing: apt-get install libssl-dev")
  endif()
endif()
