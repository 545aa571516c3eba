# DMUON_SANITIZE=thread|address: the library and its tests with ThreadSanitizer, or with
# AddressSanitizer (which finds leaks as well) and UndefinedBehaviorSanitizer. ctest gives the
# programs of such a build the options in DMUON_SANITIZER_ENVIRONMENT; one that is started by hand
# needs them as well.
#
# torch, Gloo and UCX come as they are, not instrumented: what happens inside them is not seen.
set(DMUON_SANITIZE "" CACHE STRING "Build with a sanitizer: thread, address, or nothing")
set_property(CACHE DMUON_SANITIZE PROPERTY STRINGS "" thread address)
set(DMUON_SANITIZER_ENVIRONMENT "")

if(DMUON_SANITIZE)
  set(DMUON_SUPPRESSIONS ${CMAKE_CURRENT_SOURCE_DIR}/tests/sanitizers)
  # UCX would patch libc's mmap() and its like, to keep caches that its transports within a host and
  # over TCP do not need; in a sanitizer's own versions of these functions it crashes. And it would
  # print a backtrace of its own at the signals that a sanitizer reports.
  set(DMUON_SANITIZED_UCX "UCX_MEM_EVENTS=n" "UCX_HANDLE_ERRORS=none")
  if(DMUON_SANITIZE STREQUAL "thread")
    set(DMUON_SANITIZE_FLAGS -fsanitize=thread)
    set(DMUON_SANITIZER_ENVIRONMENT "${DMUON_SANITIZED_UCX}"
      "TSAN_OPTIONS=suppressions=${DMUON_SUPPRESSIONS}/thread.supp:history_size=4")
  elseif(DMUON_SANITIZE STREQUAL "address")
    # A report ends the program: else it would pass a test, UndefinedBehaviorSanitizer's above all.
    set(DMUON_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=all)
    set(DMUON_SANITIZER_ENVIRONMENT "${DMUON_SANITIZED_UCX}"
      "LSAN_OPTIONS=suppressions=${DMUON_SUPPRESSIONS}/leak.supp:print_suppressions=0"
      "UBSAN_OPTIONS=print_stacktrace=1")
  else()
    message(FATAL_ERROR "dmuon: DMUON_SANITIZE is '${DMUON_SANITIZE}', but must be thread or address")
  endif()
  # The build must find the sanitizer's library, or say what is missing before it compiles anything.
  include(CheckCXXSourceCompiles)
  string(REPLACE ";" " " CMAKE_REQUIRED_FLAGS "${DMUON_SANITIZE_FLAGS}")
  check_cxx_source_compiles("int main() { return 0; }" DMUON_HAVE_SANITIZER_${DMUON_SANITIZE})
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT DMUON_HAVE_SANITIZER_${DMUON_SANITIZE})
    message(FATAL_ERROR "dmuon: ${CMAKE_CXX_COMPILER} cannot link with ${DMUON_SANITIZE_FLAGS}: "
      "its runtime library is missing (Debian: it comes with g++, as libtsan, libasan and libubsan)")
  endif()
  # -O1 comes after the build type's own level and overrides it: frames stay where they were written.
  # -g1 is lines without variables: all that a report shows.
  add_compile_options(${DMUON_SANITIZE_FLAGS} -O1 -g1 -fno-omit-frame-pointer)
  add_link_options(${DMUON_SANITIZE_FLAGS})
endif()

# A second and a third build of the same sources: what they cost is reading torch's headers, 15 of 20
# seconds per file. So with a sanitizer the library is two units, and the tests share precompiled
# headers. (A name that two files of a unit have in their anonymous namespaces is an error there.)
function(dmuon_unite target)
  if(NOT DMUON_SANITIZE)
    return()
  endif()
  foreach(source IN LISTS ARGN)
    if(source MATCHES "/nccl_[^/]*$")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP nccl)
    else()
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP host)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# In a build with a sanitizer: the tests that run ranks read the headers they have in common once.
function(dmuon_share_headers target source)
  file(STRINGS ${source} ranks REGEX "#include \"ranks.h\"" LIMIT_COUNT 1)
  if(NOT DMUON_SANITIZE OR NOT ranks)
    return()
  endif()
  get_property(first GLOBAL PROPERTY DMUON_SHARES_HEADERS)
  if(first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    set_property(GLOBAL PROPERTY DMUON_SHARES_HEADERS ${target})
    target_precompile_headers(${target} PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp/failure_cases.h)
  endif()
endfunction()
