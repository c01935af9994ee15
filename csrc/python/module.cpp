// gnsilu._C: choosing and the tuner for Python. Linked to libgnsilu_kernels.so, as libgnsilu_ops.so
// is, and free of torch. python/gnsilu/_C.pyi holds the signatures.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gnsilu/plan.h"
#include "tuner.h"
#include "tuner_file.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace gnsilu {
namespace {

namespace fs = std::filesystem;

// For functions that wait (for a file, a lock) or call Python back: other threads run meanwhile.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void bind_enums(py::module_& m) {
  py::enum_<DType>(m, "DType")
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("float32", DType::kFloat32)
      .value("float64", DType::kFloat64);
  py::enum_<Activation>(m, "Activation")
      .value("none", Activation::kNone)
      .value("silu", Activation::kSilu);
  py::enum_<Route>(m, "Route")
      .value("fallback", Route::kFallback)
      .value("three_pass", Route::kThreePass)
      .value("two_pass", Route::kTwoPass)
      .value("resident", Route::kResident)
      .value("ring", Route::kRing);
}

// "Name(field=value, ...)" of the attributes named.
auto repr_of(std::vector<const char*> fields) {
  return [fields = std::move(fields)](const py::object& self) {
    std::string text = py::str(py::type::of(self).attr("__name__"));
    const char* separator = "(";
    for (const char* field : fields) {
      text += separator + std::string(field) + "=" + std::string(py::repr(self.attr(field)));
      separator = ", ";
    }
    return text + ")";
  };
}

void bind_inputs(py::module_& m) {
  py::class_<Problem>(m, "Problem")
      .def(py::init([](int64_t samples, int64_t channels, int64_t spatial_size, int64_t num_groups,
                       DType x_dtype, DType y_dtype, Activation activation, bool on_cuda,
                       bool contiguous, bool aligned, bool needs_grad) {
             // channels_per_group() divides by it, and choose() counts on whole groups.
             if (samples < 0 || channels < 0 || spatial_size < 0) {
               throw std::invalid_argument("samples, channels and spatial_size must be 0 or more");
             }
             if (num_groups < 1 || channels % num_groups != 0) {
               throw std::invalid_argument("num_groups must be 1 or more and divide channels");
             }
             return Problem{samples,    channels, spatial_size, num_groups, x_dtype,   y_dtype,
                            activation, on_cuda,  contiguous,   aligned,    needs_grad};
           }),
           py::kw_only(), "samples"_a, "channels"_a, "spatial_size"_a, "num_groups"_a,
           "x_dtype"_a = DType::kBFloat16, "y_dtype"_a = DType::kBFloat16,
           "activation"_a = Activation::kSilu, "on_cuda"_a = false, "contiguous"_a = true,
           "aligned"_a = true, "needs_grad"_a = false)
      .def_readonly("samples", &Problem::samples)
      .def_readonly("channels", &Problem::channels)
      .def_readonly("spatial_size", &Problem::spatial_size)
      .def_readonly("num_groups", &Problem::num_groups)
      .def_readonly("x_dtype", &Problem::x_dtype)
      .def_readonly("y_dtype", &Problem::y_dtype)
      .def_readonly("activation", &Problem::activation)
      .def_readonly("on_cuda", &Problem::on_cuda)
      .def_readonly("contiguous", &Problem::contiguous)
      .def_readonly("aligned", &Problem::aligned)
      .def_readonly("needs_grad", &Problem::needs_grad)
      .def("__repr__",
           repr_of({"samples", "channels", "spatial_size", "num_groups", "x_dtype", "y_dtype",
                    "activation", "on_cuda", "contiguous", "aligned", "needs_grad"}));

  py::class_<Device>(m, "Device")
      .def(py::init([](std::string name, int sm_count, int capability_major, int capability_minor,
                       int driver_version, bool has_kernel_image, bool has_clusters,
                       int64_t shared_memory_per_block) {
             return Device{
                 std::move(name), sm_count,         capability_major, capability_minor,
                 driver_version,  has_kernel_image, has_clusters,     shared_memory_per_block};
           }),
           py::kw_only(), "name"_a, "sm_count"_a, "capability_major"_a, "capability_minor"_a,
           "driver_version"_a, "has_kernel_image"_a = true, "has_clusters"_a = true,
           "shared_memory_per_block"_a = 48 << 10)
      .def_readonly("name", &Device::name)
      .def_readonly("sm_count", &Device::sm_count)
      .def_readonly("capability_major", &Device::capability_major)
      .def_readonly("capability_minor", &Device::capability_minor)
      .def_readonly("driver_version", &Device::driver_version)
      .def_readonly("has_kernel_image", &Device::has_kernel_image)
      .def_readonly("has_clusters", &Device::has_clusters)
      .def_readonly("shared_memory_per_block", &Device::shared_memory_per_block)
      .def("__repr__",
           repr_of({"name", "sm_count", "capability_major", "capability_minor", "driver_version",
                    "has_kernel_image", "has_clusters", "shared_memory_per_block"}));
}

void bind_plan(py::module_& m) {
  py::class_<Config>(m, "Config")
      .def(py::init([](int threads, int vectors_in_flight) {
             return Config{threads, vectors_in_flight};
           }),
           py::kw_only(), "threads"_a = Config().threads,
           "vectors_in_flight"_a = Config().vectors_in_flight)
      .def_readonly("threads", &Config::threads)
      .def_readonly("vectors_in_flight", &Config::vectors_in_flight)
      .def(
          "__eq__", [](const Config& a, const Config& b) { return a == b; }, py::is_operator())
      .def("__hash__",
           [](const Config& config) {
             return py::hash(py::make_tuple(config.threads, config.vectors_in_flight));
           })
      .def("__str__", [](const Config& config) { return to_string(config); })
      .def("__repr__", repr_of({"threads", "vectors_in_flight"}));

  py::class_<Spans>(m, "Spans")
      .def_readonly("size", &Spans::size)
      .def_readonly("count", &Spans::count)
      .def("__repr__", repr_of({"size", "count"}));

  py::class_<Plan>(m, "Plan")
      .def_readonly("route", &Plan::route)
      .def_readonly("reason", &Plan::reason)
      .def_readonly("config", &Plan::config)
      .def_readonly("spans", &Plan::spans)
      .def_property_readonly("blocks", &Plan::blocks_per_group)
      .def_readonly("groups_per_launch", &Plan::groups_per_launch)
      .def_readonly("workspace_bytes", &Plan::workspace_bytes)
      .def_readonly("bytes_per_element", &Plan::bytes_per_element)
      .def_property_readonly("tunable", &Plan::tunable)
      .def("__repr__", repr_of({"route", "reason", "config", "spans", "blocks", "groups_per_launch",
                                "workspace_bytes", "bytes_per_element"}));

  m.def("choose", &choose, "problem"_a, "device"_a, "forced"_a = py::none());
  m.def("candidates", &candidates, "route"_a);
  m.def("route_from_name", &route_from_name, "name"_a);
  m.def(
      "spans_of",
      [](int64_t group_size) {
        if (group_size < 0 || group_size > kMaxGroupSize) {
          throw std::invalid_argument("group_size must be between 0 and " +
                                      std::to_string(kMaxGroupSize));
        }
        return spans_of(group_size);
      },
      "group_size"_a);
}

void bind_tuner(py::module_& m) {
  py::class_<TunerKey>(m, "TunerKey")
      .def(py::init([](std::string gpu, int sm_count, int driver_version, std::string kernels,
                       Route route, int64_t channels_per_group, DType x_dtype, DType y_dtype) {
             return TunerKey{std::move(gpu), sm_count,           driver_version, std::move(kernels),
                             route,          channels_per_group, x_dtype,        y_dtype};
           }),
           py::kw_only(), "gpu"_a, "sm_count"_a, "driver_version"_a, "kernels"_a, "route"_a,
           "channels_per_group"_a, "x_dtype"_a, "y_dtype"_a)
      .def_readonly("gpu", &TunerKey::gpu)
      .def_readonly("sm_count", &TunerKey::sm_count)
      .def_readonly("driver_version", &TunerKey::driver_version)
      .def_readonly("kernels", &TunerKey::kernels)
      .def_readonly("route", &TunerKey::route)
      .def_readonly("channels_per_group", &TunerKey::channels_per_group)
      .def_readonly("x_dtype", &TunerKey::x_dtype)
      .def_readonly("y_dtype", &TunerKey::y_dtype)
      .def(
          "__eq__", [](const TunerKey& a, const TunerKey& b) { return a == b; }, py::is_operator())
      .def("__hash__",
           [](const TunerKey& key) {
             return py::hash(
                 py::make_tuple(key.gpu, key.sm_count, key.kernels, key.channels_per_group));
           })
      .def("__repr__", repr_of({"gpu", "sm_count", "driver_version", "kernels", "route",
                                "channels_per_group", "x_dtype", "y_dtype"}));
  m.def("tuner_key", &tuner_key, "problem"_a, "device"_a, "route"_a);

  py::class_<Tuner>(m, "Tuner")
      .def(py::init([](const std::optional<fs::path>& directory,
                       std::function<void(const std::string&)> warn) {
             return new Tuner(directory ? directory->string() : "", std::move(warn));
           }),
           "directory"_a, "warn"_a)
      .def(
          "find", [](Tuner& tuner, const TunerKey& key) { return tuner.find(key); }, "key"_a,
          ReleaseGil())
      .def("tune", &Tuner::tune, "key"_a, "timer"_a, "budget_seconds"_a = 1.0, ReleaseGil())
      .def("clear", &Tuner::clear, ReleaseGil());
}

void bind_tuner_file(py::module_& m) {
  py::class_<TunerEntry>(m, "TunerEntry")
      .def(py::init([](TunerKey key, Config config, double microseconds, std::string made) {
             return TunerEntry{std::move(key), config, microseconds, std::move(made)};
           }),
           py::kw_only(), "key"_a, "config"_a, "microseconds"_a, "made"_a)
      .def_readonly("key", &TunerEntry::key)
      .def_readonly("config", &TunerEntry::config)
      .def_readonly("microseconds", &TunerEntry::microseconds)
      .def_readonly("made", &TunerEntry::made)
      .def("__repr__", repr_of({"key", "config", "microseconds", "made"}));

  py::class_<TunerFileContents>(m, "TunerFileContents")
      .def_readonly("gpu", &TunerFileContents::gpu)
      .def_readonly("entries", &TunerFileContents::entries)
      .def_readonly("fault", &TunerFileContents::fault)
      .def("__repr__", repr_of({"gpu", "entries", "fault"}));

  py::class_<RemovedTunerFiles>(m, "RemovedTunerFiles")
      .def_property_readonly("paths",
                             [](const RemovedTunerFiles& removed) {
                               return std::vector<fs::path>(removed.paths.begin(),
                                                            removed.paths.end());
                             })
      .def_readonly("faults", &RemovedTunerFiles::faults)
      .def("__repr__", repr_of({"paths", "faults"}));

  m.def("cache_directory", []() -> std::optional<fs::path> {
    const std::string directory = cache_directory();
    if (directory.empty()) return {};
    return directory;
  });
  m.def(
      "tuner_file_path",
      [](const fs::path& directory, const std::string& gpu) {
        return fs::path(tuner_file_path(directory.string(), gpu));
      },
      "directory"_a, "gpu"_a);
  m.def(
      "tuner_files",
      [](const fs::path& directory) {
        const std::vector<std::string> paths = tuner_files(directory.string());
        return std::vector<fs::path>(paths.begin(), paths.end());
      },
      "directory"_a, ReleaseGil());
  m.def(
      "read_tuner_file",
      [](const fs::path& path, const std::optional<std::string>& gpu) {
        return read_tuner_file(path.string(), gpu);
      },
      "path"_a, "gpu"_a = py::none(), ReleaseGil());
  m.def(
      "write_tuner_entry",
      [](const fs::path& path, const TunerEntry& entry) {
        return write_tuner_entry(path.string(), entry);
      },
      "path"_a, "entry"_a, ReleaseGil());
  m.def(
      "remove_tuner_files",
      [](const fs::path& directory) { return remove_tuner_files(directory.string()); },
      "directory"_a, ReleaseGil());
}

// "80;90" or "80,90" as a tuple of strings.
py::tuple architectures() {
  py::list found;
  std::string name;
  for (const char c : std::string(GNSILU_ARCHITECTURES) + ";") {
    if (c != ';' && c != ',') {
      name += c;
    } else if (!name.empty()) {
      found.append(std::move(name));
      name.clear();
    }
  }
  return py::tuple(found);
}

void bind_build_facts(py::module_& m) {
  m.attr("version") = GNSILU_VERSION;
  m.attr("cuda_version") = GNSILU_CUDA_VERSION;  // empty in a build for the CPU only
  m.attr("architectures") = architectures();
  m.attr("compiler") = GNSILU_COMPILER;
  m.attr("kernel_version") = kernel_version();
}

}  // namespace
}  // namespace gnsilu

PYBIND11_MODULE(_C, m) {
  m.doc() = "Choosing, the launch tuner and build facts of gnsilu.";
  gnsilu::bind_enums(m);
  gnsilu::bind_inputs(m);
  gnsilu::bind_plan(m);
  gnsilu::bind_tuner(m);
  gnsilu::bind_tuner_file(m);
  gnsilu::bind_build_facts(m);
}
