# Finds the torch that Python imports, without find_package(Torch): that one needs nvcc for CUDA
# wheels, and ties its users to libtorch_cuda.
#
# Targets: dmuon::torch (c10, torch_cpu) and, with DMUON_BUILD_PYTHON, dmuon::torch_python.
# Variables: DMUON_TORCH_DIR, DMUON_TORCH_VERSION.
macro(dmuon_add_torch)
  if(DMUON_BUILD_PYTHON)
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  elseif(NOT DMUON_TORCH_DIR)
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
  endif()
  if(NOT DMUON_TORCH_DIR)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations)[0] if s else '')"
      OUTPUT_VARIABLE DMUON_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
  if(NOT EXISTS "${DMUON_TORCH_DIR}/include/torch")
    message(FATAL_ERROR "dmuon: torch was not found for ${Python3_EXECUTABLE}: install it there, "
      "pass -DPython3_EXECUTABLE=..., or -DDMUON_TORCH_DIR=<folder of the torch package>")
  endif()
  file(STRINGS "${DMUON_TORCH_DIR}/version.py" DMUON_TORCH_VERSION_LINE REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" DMUON_TORCH_VERSION "${DMUON_TORCH_VERSION_LINE}")
  message(STATUS "dmuon: torch ${DMUON_TORCH_VERSION} in ${DMUON_TORCH_DIR}")

  if(NOT TARGET dmuon::torch)
    add_library(dmuon::torch INTERFACE IMPORTED GLOBAL)
    target_include_directories(dmuon::torch SYSTEM INTERFACE
      ${DMUON_TORCH_DIR}/include ${DMUON_TORCH_DIR}/include/torch/csrc/api/include)
    target_compile_features(dmuon::torch INTERFACE cxx_std_20)
    # Full paths, so that CMake gives programs in the build tree the right run path.
    target_link_libraries(dmuon::torch INTERFACE
      ${DMUON_TORCH_DIR}/lib/libtorch_cpu.so ${DMUON_TORCH_DIR}/lib/libc10.so)
  endif()
  if(DMUON_BUILD_PYTHON AND NOT TARGET dmuon::torch_python)
    add_library(dmuon::torch_python INTERFACE IMPORTED GLOBAL)
    target_link_libraries(dmuon::torch_python INTERFACE dmuon::torch
      ${DMUON_TORCH_DIR}/lib/libtorch_python.so)
  endif()
endmacro()
