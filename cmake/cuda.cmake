# Decides whether to build the CUDA kernels, with which nvcc and for which GPUs.
# Sets GNSILU_WITH_CUDA (1 or 0), GNSILU_CUDA_VERSION and GNSILU_ARCHITECTURES, enables the language
# and defines gnsilu::cudart, the static CUDA runtime.
#
# GNSILU_CUDA                ON: no nvcc is an error; OFF: CPU only; AUTO (default): as there is one
# GNSILU_CUDA_ARCHITECTURES  for instance "75;90;120" or "7.5,9.0"; PTX is added for the newest
# Both may be given as CMake variables or in the environment.

set(GNSILU_ALL_ARCHITECTURES 75 80 86 89 90 100 120)

# Takes a setting that CMake was not given from the environment, and keeps it for later runs.
macro(gnsilu_setting name)
  if("${${name}}" STREQUAL "" AND NOT "$ENV{${name}}" STREQUAL "")
    set(${name} "$ENV{${name}}" CACHE STRING "see cmake/cuda.cmake" FORCE)
  endif()
endmacro()

# An nvcc of torch's major version: CUDACXX, CUDA_HOME, PATH, the usual folder, NVIDIA's wheels.
function(gnsilu_find_nvcc result)
  string(REGEX MATCH "^[0-9]+" wanted "${TORCH_CUDA_VERSION}")
  find_program(on_path nvcc NO_CACHE)
  set(found "")
  foreach(nvcc IN ITEMS "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc" "${on_path}"
          /usr/local/cuda/bin/nvcc LISTS TORCH_NVIDIA_DIRS)
    if(IS_DIRECTORY "${nvcc}")
      set(nvcc "${nvcc}/bin/nvcc")
    endif()
    if(NOT EXISTS "${nvcc}")
      continue()
    endif()
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version ERROR_QUIET)
    if(version MATCHES "release ([0-9]+)" AND CMAKE_MATCH_1 EQUAL wanted)
      set(found "${nvcc}")
      break()
    endif()
    message(STATUS "Passed over ${nvcc}: PyTorch was built for CUDA ${TORCH_CUDA_VERSION}")
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# The compute capabilities of the GPUs in this machine, such as 90; empty without any.
function(gnsilu_visible_architectures result)
  set(${result} "" PARENT_SCOPE)
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(nvidia_smi)
    execute_process(COMMAND ${nvidia_smi} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities RESULT_VARIABLE status ERROR_QUIET)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
      string(REPLACE "." "" capabilities "${capabilities}")
      set(${result} "${capabilities}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets `result` in CMake's notation: machine code for each, and PTX of the newest.
function(gnsilu_choose_architectures nvcc result)
  set(list ${GNSILU_CUDA_ARCHITECTURES})
  if(NOT list)
    gnsilu_visible_architectures(list)
  endif()
  if(NOT list)
    execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE supported)
    foreach(architecture IN LISTS GNSILU_ALL_ARCHITECTURES)
      if(supported MATCHES "compute_${architecture}\n")
        list(APPEND list ${architecture})
      endif()
    endforeach()
  endif()
  string(REPLACE "." "" list "${list}")
  string(REGEX REPLACE "[, ]+" ";" list "${list}")
  list(REMOVE_DUPLICATES list)
  list(SORT list COMPARE NATURAL)
  foreach(architecture IN LISTS list)
    if(NOT architecture MATCHES "^[0-9]+$")
      message(FATAL_ERROR "GNSILU_CUDA_ARCHITECTURES: '${architecture}' is not a compute "
        "capability; wanted is a list such as 75;90;120")
    endif()
  endforeach()
  list(POP_BACK list newest)
  list(TRANSFORM list APPEND "-real")
  set(${result} ${list} ${newest} PARENT_SCOPE)
endfunction()

# --- What is built ----------------------------------------------------------------------------

set(GNSILU_WITH_CUDA 0)
set(GNSILU_ARCHITECTURES "")
set(GNSILU_CUDA_VERSION "")
gnsilu_setting(GNSILU_CUDA)
gnsilu_setting(GNSILU_CUDA_ARCHITECTURES)
set(cuda_wanted "${GNSILU_CUDA}")
if("${cuda_wanted}" STREQUAL "")
  set(cuda_wanted AUTO)
endif()
set(nvcc "")
if(NOT cuda_wanted STREQUAL "AUTO" AND NOT cuda_wanted)
  set(reason "GNSILU_CUDA is ${cuda_wanted}")
elseif(NOT TORCH_CUDA_VERSION)
  set(reason "this PyTorch was built without CUDA")
else()
  gnsilu_find_nvcc(nvcc)
  set(reason "no nvcc for CUDA ${TORCH_CUDA_VERSION} in CUDACXX, CUDA_HOME, PATH or NVIDIA's wheels")
endif()

if(nvcc)
  set(GNSILU_WITH_CUDA 1)
  gnsilu_choose_architectures(${nvcc} CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_COMPILER ${nvcc})
  get_filename_component(toolkit ${nvcc} REALPATH)
  cmake_path(SET toolkit NORMALIZE "${toolkit}/../..")
  if(EXISTS ${toolkit}/lib/libcudart_static.a AND NOT EXISTS ${toolkit}/lib64)
    # NVIDIA's wheels: their nvcc looks for its libraries in lib64.
    set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
  endif()
  enable_language(CUDA)
  # Not FindCUDAToolkit, which wants a libcudart.so that the wheels do not have.
  find_package(Threads REQUIRED)
  find_library(cudart cudart_static REQUIRED NO_CACHE HINTS ${toolkit}/lib64 ${toolkit}/lib)
  add_library(gnsilu_cudart INTERFACE)
  add_library(gnsilu::cudart ALIAS gnsilu_cudart)
  target_link_libraries(gnsilu_cudart INTERFACE ${cudart} Threads::Threads ${CMAKE_DL_LIBS} rt)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" GNSILU_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  # For build_info(): "sm_75,sm_90,compute_90".
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^([0-9]+)(-real)?$" "sm_\\1"
    OUTPUT_VARIABLE GNSILU_ARCHITECTURES)
  list(GET CMAKE_CUDA_ARCHITECTURES -1 newest)
  list(APPEND GNSILU_ARCHITECTURES compute_${newest})
  list(JOIN GNSILU_ARCHITECTURES "," GNSILU_ARCHITECTURES)
  message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${GNSILU_ARCHITECTURES}")
elseif(NOT cuda_wanted STREQUAL "AUTO" AND cuda_wanted)
  message(FATAL_ERROR "GNSILU_CUDA is ${cuda_wanted}, but ${reason}")
else()
  message(STATUS "CPU-ONLY BUILD, without the CUDA kernels: ${reason}")
endif()
