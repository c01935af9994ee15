# Libraries of others: the machine's where there are any, else fetched at a pinned release.
include(FetchContent)

find_package(nlohmann_json 3.9 QUIET)
if(nlohmann_json_FOUND)
  message(STATUS "nlohmann-json ${nlohmann_json_VERSION}")
else()
  message(STATUS "nlohmann-json is not installed: fetching it")
  FetchContent_Declare(nlohmann_json
    GIT_REPOSITORY https://github.com/nlohmann/json.git
    GIT_TAG v3.12.0
    GIT_SHALLOW ON)
  FetchContent_MakeAvailable(nlohmann_json)
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_package(pybind11 2.12 QUIET HINTS ${pybind11_folder})
if(pybind11_FOUND)
  message(STATUS "pybind11 ${pybind11_VERSION}")
else()
  message(STATUS "pybind11 is not installed: fetching it")
  FetchContent_Declare(pybind11
    GIT_REPOSITORY https://github.com/pybind/pybind11.git
    GIT_TAG v2.13.6
    GIT_SHALLOW ON)
  FetchContent_MakeAvailable(pybind11)
endif()

if(GNSILU_BUILD_TESTS)
  find_package(GTest 1.10 QUIET)
  if(GTest_FOUND)
    message(STATUS "GoogleTest ${GTest_VERSION}")
  else()
    message(STATUS "GoogleTest is not installed: fetching it")
    FetchContent_Declare(googletest
      GIT_REPOSITORY https://github.com/google/googletest.git
      GIT_TAG v1.15.2
      GIT_SHALLOW ON)
    set(INSTALL_GTEST OFF)
    FetchContent_MakeAvailable(googletest)
  endif()
endif()
