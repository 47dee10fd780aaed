// SPDX-License-Identifier: Apache-2.0
// Tests `fused` on the GPU of this machine and times it: JSON lines on the standard output, a
// summary last. Takes no test framework, so that it can be sent to a machine that has a driver and
// cuDNN alone.
//
//   octavo_fused_gpu [--seconds N] [--only NAME] [--probe] [--deterministic]
//   octavo_fused_gpu --bench [--seconds N] [--only NAME] [--deterministic]
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cudnn/fused.h"
#include "kernels/cudnn/library.h"
#include "kernels_cudnn/gpu/device_problem.h"
#include "kernels_cudnn/gpu/fused_bench.h"
#include "kernels_cudnn/gpu/fused_cases.h"

namespace octavo::test {
namespace {

using kernels::fused::CallOptions;
using kernels::fused::FusedAttention;
using kernels::fused::FusedOptions;
using kernels::fused::Maxima;

std::mutex print_mutex;
bool deterministic_engines = false;

void print(const std::string& line) {
  const std::scoped_lock lock(print_mutex);
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

std::string quoted(std::string text) {
  for (char& c : text) {
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ') c = '\'';
  }
  return '"' + text + '"';
}

struct Worker {
  Worker(std::int32_t arch, bool deterministic)
      : attention(arch, FusedOptions{.deterministic = deterministic}) {
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Worker() { cudaStreamDestroy(stream); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  FusedAttention attention;
  cudaStream_t stream = nullptr;
};

Maxima maxima_of(const DeviceProblem& problem, const Spec& spec) {
  const auto& batch = problem.params().batch;
  Maxima maxima{batch.num_seqs, batch.num_tokens, problem.max_q_len(), problem.max_kv_len()};
  maxima.exact = maxima.uniform = true;
  for (const SeqLens& seq : spec.lens) {
    if (seq.q > seq.kv) maxima.exact = false;
    if (seq.q != spec.lens[0].q || seq.kv != spec.lens[0].kv) maxima.uniform = false;
  }
  return maxima;
}

void synchronize(Worker& worker) {
  cuda_check(cudaStreamSynchronize(worker.stream), "cudaStreamSynchronize");
}

Verdict run_case(Worker& worker, const Spec& spec, bool clear_tails, double& build_ms) {
  DeviceProblem problem(spec);
  const Maxima maxima = maxima_of(problem, spec);
  const auto start = std::chrono::steady_clock::now();
  const std::size_t bytes = worker.attention.workspace_bytes(problem.params(), maxima);
  build_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  const DeviceArray workspace(bytes);
  upload(workspace, std::vector<std::uint8_t>(bytes, 0xFF));
  CallOptions options;
  options.clear_tails = clear_tails;
  std::vector<std::uint16_t> first;
  Verdict verdict;
  for (int run = 0; run < 2; ++run) {
    problem.reset_results();
    worker.attention.attend(problem.params(), maxima, options, workspace.as<void>(), bytes,
                            worker.stream);
    synchronize(worker);
    if (run == 0) {
      verdict = problem.judge();
      first = problem.out_bits();
    } else {
      const auto second = problem.out_bits();
      for (std::size_t i = 0; i < first.size(); ++i) {
        if (first[i] != second[i] && verdict.changed_bits++ == 0) verdict.first_changed = i;
      }
    }
  }
  return verdict;
}

std::string report(const Spec& spec, const Verdict& v, double build_ms) {
  return fmt::format(
      R"({{"test": {}, "ok": {}, "out_error": {:.3f}, "lse_error": {:.3f}, "nan": {}, "bad_padding": {}, "guard": {}, "changed_bits": {}, "first_changed": {}, "build_ms": {:.0f}}})",
      quoted(spec.name()), v.ok(), v.out_error, v.lse_error, v.nan_outputs, v.bad_padding,
      v.changed_guard, v.changed_bits, v.first_changed, build_ms);
}

/// Runs `job(worker, i)` for i < count on several threads, each with graphs and a stream of its
/// own.
void spread(std::int32_t arch, std::size_t count, double seconds,
            const std::function<void(Worker&, std::size_t)>& job) {
  std::atomic<std::size_t> next{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto work = [&] {
    Worker worker(arch, deterministic_engines);
    while (std::chrono::steady_clock::now() < deadline) {
      const std::size_t i = next++;
      if (i >= count) return;
      job(worker, i);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::min(8U, std::thread::hardware_concurrency()); ++i)
    threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

bool test_cases(std::int32_t arch, double seconds, const std::string& only) {
  std::vector<Spec> cases;
  for (const Spec& spec : fused_cases()) {
    if (spec.name().find(only) != std::string::npos) cases.push_back(spec);
  }
  std::atomic<int> passed{0};
  std::atomic<int> failed{0};
  spread(arch, cases.size(), seconds, [&](Worker& worker, std::size_t i) {
    try {
      double build_ms = 0;
      const Verdict verdict = run_case(worker, cases[i], true, build_ms);
      ++(verdict.ok() ? passed : failed);
      print(report(cases[i], verdict, build_ms));
    } catch (const std::exception& error) {
      ++failed;
      print(fmt::format(R"({{"test": {}, "ok": false, "threw": {}}})", quoted(cases[i].name()),
                        quoted(error.what())));
    }
  });
  print(fmt::format(R"({{"summary": "cases", "passed": {}, "failed": {}, "not_run": {}}})",
                    passed.load(), failed.load(),
                    cases.size() - static_cast<std::size_t>(passed + failed)));
  return failed == 0;
}

/// One captured graph, replayed with other lengths and compositions within its maxima.
bool test_capture(std::int32_t arch, TensorFormat format, bool decode) {
  Worker worker(arch, deterministic_engines);
  Spec spec;
  spec.format = format;
  spec.page_size = 24;
  const std::int32_t q = decode ? 1 : 40;
  spec.lens = {{q, 200}, {q, 150}, {q, 333}, {q, 90}};
  DeviceProblem problem(spec);
  Maxima maxima = maxima_of(problem, spec);
  maxima.exact = maxima.uniform = false;
  const std::size_t bytes = worker.attention.workspace_bytes(problem.params(), maxima);
  const DeviceArray workspace(bytes);
  CallOptions options;
  options.clear_tails = true;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda_check(cudaStreamBeginCapture(worker.stream, cudaStreamCaptureModeThreadLocal), "capture");
  worker.attention.attend(problem.params(), maxima, options, workspace.as<void>(), bytes,
                          worker.stream);
  cuda_check(cudaStreamEndCapture(worker.stream, &graph), "cudaStreamEndCapture");
  cuda_check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  std::vector<std::vector<SeqLens>> steps = {spec.lens};
  if (decode) {
    steps.push_back({{1, 64}, {0, 0}, {1, 1}, {0, 0}});
    steps.push_back({{0, 0}, {0, 0}, {0, 0}, {0, 0}});
    steps.push_back({{1, 199}, {1, 65}, {1, 300}, {1, 90}});
  } else {
    steps.push_back({{3, 64}, {0, 0}, {1, 1}, {0, 0}});
    steps.push_back({{40, 40}, {1, 65}, {39, 300}, {0, 90}});
  }
  bool ok = true;
  for (const auto& lens : steps) {
    problem.shrink(lens);
    problem.reset_results();
    cuda_check(cudaGraphLaunch(exec, worker.stream), "cudaGraphLaunch");
    synchronize(worker);
    const Verdict verdict = problem.judge();
    const auto replayed = problem.out_bits();
    problem.reset_results();
    worker.attention.attend(problem.params(), maxima, options, workspace.as<void>(), bytes,
                            worker.stream);
    synchronize(worker);
    const bool same = replayed == problem.out_bits();
    ok = ok && verdict.ok() && same;
    print(fmt::format(
        R"({{"test": "capture {} {}", "ok": {}, "out_error": {:.3f}, "nan": {}, "bad_padding": {}, "equals_eager": {}}})",
        to_string(format), decode ? "decode" : "mixed", verdict.ok() && same, verdict.out_error,
        verdict.nan_outputs, verdict.bad_padding, same));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return ok;
}

/// How far behind a sequence's end cuDNN reads: NaN from `distance` slots on, in K, in V, nothing
/// cleared.
void probe_tails(std::int32_t arch) {
  struct Probe {
    Spec spec;
    std::int32_t distance;
    bool k, v;
  };
  std::vector<Probe> probes;
  for (const std::int32_t kind : {0, 1, 2}) {
    for (const bool decode : {false, true}) {
      for (const std::int32_t distance : {0, 16, 63, 127, 255}) {
        for (const bool k : {false, true}) {
          Spec spec;
          spec.contiguous = kind == 0;
          spec.shuffled_rows = kind != 0;
          spec.page_size = kind == 0 ? 1024 : kind == 1 ? 256 : 16;
          spec.lens = decode ? std::vector<SeqLens>{{1, 65}, {1, 129}, {1, 1}, {1, 300}}
                             : std::vector<SeqLens>{{5, 65}, {33, 129}, {1, 1}, {129, 300}};
          spec.first_poison = distance;
          spec.poison_k = k;
          spec.poison_v = !k;
          probes.push_back({spec, distance, k, !k});
        }
      }
    }
  }
  spread(arch, probes.size(), 60, [&](Worker& worker, std::size_t i) {
    const Probe& probe = probes[i];
    try {
      double build_ms = 0;
      const Verdict verdict = run_case(worker, probe.spec, false, build_ms);
      print(fmt::format(
          R"({{"probe": {}, "poison": "{}", "from": {}, "nan": {}, "out_error": {:.3f}}})",
          quoted(probe.spec.name()), probe.k ? "k" : "v", probe.distance, verdict.nan_outputs,
          verdict.out_error));
    } catch (const std::exception& error) {
      print(fmt::format(R"({{"probe": {}, "threw": {}}})", quoted(probe.spec.name()),
                        quoted(error.what())));
    }
  });
}

int main_of(const std::vector<std::string>& arguments) {
  double seconds = 100;
  std::string only;
  bool bench = false;
  bool probe = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--seconds") seconds = std::stod(arguments.at(++i));
    if (arguments[i] == "--only") only = arguments.at(++i);
    if (arguments[i] == "--bench") bench = true;
    if (arguments[i] == "--probe") probe = true;
    if (arguments[i] == "--deterministic") deterministic_engines = true;
  }
  cudaDeviceProp device{};
  const auto& cudnn = kernels::fused::library();
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || !cudnn.found()) {
    print(fmt::format(R"({{"skipped": {}}})", quoted(cudnn.found() ? "no GPU" : cudnn.why_not)));
    return 77;
  }
  print(fmt::format(R"({{"device": {}, "sm": {}{}, "cudnn": "{}"}})", quoted(device.name),
                    device.major, device.minor, cudnn.version_text));
  const std::int32_t arch = device.major * 10 + device.minor;
  if (bench) {
    bench_fused(arch, device.name, seconds, only, deterministic_engines);
    return 0;
  }
  bool ok = true;
  if (only.empty()) {
    for (const TensorFormat format : {TensorFormat::Thd, TensorFormat::Bshd, TensorFormat::Sbhd}) {
      for (const bool decode : {false, true}) ok = test_capture(arch, format, decode) && ok;
    }
  }
  if (probe) probe_tails(arch);
  return test_cases(arch, seconds, only) && ok ? 0 : 1;
}

}  // namespace
}  // namespace octavo::test

int main(int argc, char** argv) {
  try {
    return octavo::test::main_of({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
