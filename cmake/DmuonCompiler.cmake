# What is about the machine and not about dmuon: compiler check, ccache, parallel compile jobs.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "dmuon: g++ 12 or newer is needed for C++20, "
    "found ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER})")
endif()

# Relative paths in the cache's keys: another checkout of the same sources hits.
find_program(DMUON_CCACHE ccache)
if(DMUON_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${DMUON_CCACHE})
endif()

# A unit that includes torch's headers takes up to 1.2 GB in the compiler, so the number of cores
# alone is a bad limit.
cmake_host_system_information(RESULT DMUON_CORES QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT DMUON_MEMORY_MB QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR DMUON_DEFAULT_JOBS "${DMUON_MEMORY_MB} / 1500")
if(DMUON_DEFAULT_JOBS GREATER DMUON_CORES)
  set(DMUON_DEFAULT_JOBS ${DMUON_CORES})
elseif(DMUON_DEFAULT_JOBS LESS 1)
  set(DMUON_DEFAULT_JOBS 1)
endif()
set(DMUON_COMPILE_JOBS ${DMUON_DEFAULT_JOBS} CACHE STRING "Compilers that may run at once (Ninja)")
set_property(GLOBAL APPEND PROPERTY JOB_POOLS dmuon_compile=${DMUON_COMPILE_JOBS})
set(CMAKE_JOB_POOL_COMPILE dmuon_compile)
