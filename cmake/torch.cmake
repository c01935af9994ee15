# PyTorch, found by asking the interpreter: its own CMake package searches for far more than a
# dispatcher library needs. Defines the target gnsilu::torch and TORCH_* (see query_torch.py).

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/query_torch.py
  OUTPUT_VARIABLE torch_facts
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_status)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch. Install it first "
    "(pip install torch), and build with 'pip install --no-build-isolation .'.\n${torch_error}")
endif()
foreach(name VERSION CUDA_VERSION CXX11_ABI INCLUDE_DIRS LIBRARY_DIR NVIDIA_DIRS)
  if(NOT torch_facts MATCHES "${name}=([^\n]*)")
    message(FATAL_ERROR "query_torch.py did not print ${name}")
  endif()
  set(TORCH_${name} "${CMAKE_MATCH_1}")
endforeach()

# The language of torch's headers, and so of what includes them: they use C++20 from 2.14 on. The
# rest is C++17 whatever the torch, so that its libraries come out the same.
if(TORCH_VERSION VERSION_GREATER_EQUAL 2.14)
  set(torch_standard 20)
else()
  set(torch_standard 17)
endif()

# Our libraries hand each other std::string; all have to use torch's layout of it.
add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})

add_library(gnsilu_torch INTERFACE)
add_library(gnsilu::torch ALIAS gnsilu_torch)
target_include_directories(gnsilu_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_compile_features(gnsilu_torch INTERFACE cxx_std_${torch_standard})
target_link_directories(gnsilu_torch INTERFACE ${TORCH_LIBRARY_DIR})
target_link_libraries(gnsilu_torch INTERFACE torch torch_cpu c10)
message(STATUS
  "PyTorch ${TORCH_VERSION} in ${TORCH_LIBRARY_DIR}, C++${torch_standard}")
