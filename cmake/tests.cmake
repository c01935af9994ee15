# The C++ tests: each tests/cpp/*_test.cpp is a GoogleTest program over the core, without torch or
# a GPU (launch_test over the kernels' library); the *_program.cpp are ordinary C++ programs that
# link libtorch and the op library.
include(GoogleTest)
set(tests_folder ${CMAKE_BINARY_DIR}/tests)

file(GLOB test_sources CONFIGURE_DEPENDS tests/cpp/*_test.cpp)
foreach(source IN LISTS test_sources)
  get_filename_component(name ${source} NAME_WE)
  if(name STREQUAL "launch_test" AND NOT GNSILU_WITH_CUDA)
    continue()
  endif()
  add_executable(${name} ${source})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${tests_folder})
  if(name STREQUAL "launch_test")
    target_link_libraries(${name} PRIVATE gnsilu_options gnsilu_kernels GTest::gtest_main)
  else()
    target_link_libraries(${name} PRIVATE gnsilu_core GTest::gtest_main)
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST)
endforeach()

# The second runs what tests/python/test_aot_inductor.py makes.
foreach(name IN ITEMS op_program aoti_program)
  add_executable(${name} tests/cpp/${name}.cpp)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${tests_folder})
  target_link_libraries(${name} PRIVATE gnsilu_options gnsilu::torch gnsilu_ops)
  if(GNSILU_WITH_CUDA)
    target_link_libraries(${name} PRIVATE torch_cuda c10_cuda)
  endif()
endforeach()
add_test(NAME op_program COMMAND op_program)
