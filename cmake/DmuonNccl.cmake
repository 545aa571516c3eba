# NCCL's header and CUDA's, from the wheels that torch depends on (nvidia-nccl-cu13 and
# nvidia-cuda-runtime, or their cu12 forms). Optional: without them, owner collectives of CUDA
# tensors are refused. Neither library is linked: torch has loaded both when they are needed.
option(DMUON_NCCL "Build the NCCL transport if NCCL's headers are found" ON)
if(DMUON_NCCL)
  if(NOT DMUON_NVIDIA_DIR AND Python3_EXECUTABLE)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u; s = u.find_spec('nvidia'); print(list(s.submodule_search_locations)[0] if s else '')"
      OUTPUT_VARIABLE DMUON_NVIDIA_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_path(DMUON_NCCL_INCLUDE nccl.h HINTS ${DMUON_NVIDIA_DIR}/nccl/include)
  find_path(DMUON_CUDA_INCLUDE cuda_runtime.h
    HINTS ${DMUON_NVIDIA_DIR}/cu13/include ${DMUON_NVIDIA_DIR}/cuda_runtime/include
    PATHS /usr/local/cuda/include)
  if(DMUON_NCCL_INCLUDE AND DMUON_CUDA_INCLUDE)
    include(CheckIncludeFileCXX)
    set(CMAKE_REQUIRED_INCLUDES ${DMUON_NCCL_INCLUDE} ${DMUON_CUDA_INCLUDE})
    check_include_file_cxx(nccl.h DMUON_NCCL_HEADER_COMPILES)
    unset(CMAKE_REQUIRED_INCLUDES)
  endif()
  if(DMUON_NCCL_HEADER_COMPILES)
    set_source_files_properties(backend/src/nccl_library.cpp PROPERTIES
      COMPILE_DEFINITIONS DMUON_HAVE_NCCL
      INCLUDE_DIRECTORIES "${DMUON_NCCL_INCLUDE};${DMUON_CUDA_INCLUDE}")
    target_link_libraries(dmuon PRIVATE ${CMAKE_DL_LIBS})
    message(STATUS "dmuon: NCCL's header in ${DMUON_NCCL_INCLUDE}, CUDA's in ${DMUON_CUDA_INCLUDE}")
  else()
    message(STATUS "dmuon: no NCCL header found: no owner collectives of CUDA tensors")
  endif()
endif()
