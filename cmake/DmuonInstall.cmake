# Two ways to install: a plain CMake prefix (library, headers, package config), and, under
# scikit-build-core, the same below the Python package, so that
# find_package(dmuon) works from a wheel: dmuon.cmake_prefix_path.
include(CMakePackageConfigHelpers)

set(DMUON_CMAKE_DIR ${DMUON_PREFIX}lib/cmake/dmuon)

install(TARGETS dmuon EXPORT dmuonTargets LIBRARY DESTINATION ${DMUON_PREFIX}lib
  NAMELINK_COMPONENT dmuon_development)
install(DIRECTORY backend/include/dmuon optim/include/dmuon DESTINATION ${DMUON_PREFIX}include)
install(EXPORT dmuonTargets NAMESPACE dmuon:: DESTINATION ${DMUON_CMAKE_DIR})
configure_package_config_file(cmake/dmuonConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/dmuonConfig.cmake INSTALL_DESTINATION ${DMUON_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/dmuonConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dmuonConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/dmuonConfigVersion.cmake cmake/DmuonTorch.cmake
  DESTINATION ${DMUON_CMAKE_DIR})
if(DMUON_BUILD_TOOLS)
  install(TARGETS dmuon_perf RUNTIME DESTINATION ${DMUON_PREFIX}bin)
endif()
if(SKBUILD AND DMUON_BUILD_PYTHON)
  install(TARGETS _C LIBRARY DESTINATION dmuon)
  install(FILES ${DMUON_PYTHON_OUTPUT}/_build_info.py DESTINATION dmuon)
endif()
