# UCX's headers, from the wheel libucx of the Python in use or from the system. Optional: without
# them, the owner collectives of CPU tensors have Gloo only. The library itself is loaded at run time.
option(DMUON_UCX "Build the UCX transport if UCX's headers are found" ON)
if(DMUON_UCX)
  if(NOT DMUON_UCX_DIR AND Python3_EXECUTABLE)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u; s = u.find_spec('libucx'); print(list(s.submodule_search_locations)[0] if s else '')"
      OUTPUT_VARIABLE DMUON_UCX_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_package(ucx QUIET HINTS ${DMUON_UCX_DIR})
  if(TARGET ucx::ucp)
    get_target_property(DMUON_UCX_INCLUDE ucx::ucp INTERFACE_INCLUDE_DIRECTORIES)
    get_target_property(DMUON_UCX_LIBRARY ucx::ucp IMPORTED_LOCATION)
    # A wheel is used on other machines, and finds the library beside itself.
    set(_dmuon_ucx_library "${DMUON_UCX_LIBRARY}")
    if(SKBUILD)
      set(_dmuon_ucx_library "")
    endif()
    target_include_directories(dmuon SYSTEM PRIVATE ${DMUON_UCX_INCLUDE})
    target_compile_definitions(dmuon PRIVATE DMUON_HAVE_UCX
      DMUON_UCX_BUILD_LIBRARY="${_dmuon_ucx_library}")
    target_link_libraries(dmuon PRIVATE ${CMAKE_DL_LIBS})
    message(STATUS "dmuon: UCX ${ucx_VERSION} in ${DMUON_UCX_INCLUDE}")
  else()
    message(STATUS "dmuon: no UCX found (pip install libucx-cu13): CPU tensors go over Gloo only")
  endif()
endif()
