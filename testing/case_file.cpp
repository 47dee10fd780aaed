// SPDX-License-Identifier: Apache-2.0
#include "testing/case_file.h"

#include "testing/case_names.h"
#include "testing/input_error.h"
#include "testing/json_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <string_view>

namespace octavo::testkit {

namespace {

constexpr const char* kDescriptionKey = "octavo_case";
constexpr std::int64_t kVersion = 1;
constexpr double kFloatMax = std::numeric_limits<float>::max();

template <typename EnumT, std::size_t kCount>
EnumT word(const Json& value, const CaseWord<EnumT> (&words)[kCount], const std::string& what) {
  const std::string got = text(value, what);
  std::string wanted;
  for (const CaseWord<EnumT>& candidate : words) {
    if (got == candidate.name) return candidate.value;
    wanted += fmt::format("{}{}", wanted.empty() ? "" : ", ", candidate.name);
  }
  throw InputError(fmt::format("{}: wanted one of {}, got '{}'", what, wanted, printable(got)));
}

template <typename EnumT, std::size_t kCount>
const char* spelling(EnumT value, const CaseWord<EnumT> (&words)[kCount]) {
  for (const CaseWord<EnumT>& candidate : words) {
    if (value == candidate.value) return candidate.name;
  }
  return "";
}

// Numbers that `description` holds go to `config`; `required` ones must be there.
template <typename ConfigT, typename ValueT, std::size_t kCount>
void read_numbers(const Json& description, const CaseNumber<ConfigT, ValueT> (&numbers)[kCount],
                  const std::string& what, ConfigT& config) {
  for (const auto& number : numbers) {
    const Json& value = member(description, number.name, what);
    config.*number.member = static_cast<ValueT>(
        integer(value, number.low, number.high, fmt::format("{}.{}", what, number.name)));
  }
}

template <typename ConfigT, typename ValueT, std::size_t kCount>
void write_numbers(const ConfigT& config, const CaseNumber<ConfigT, ValueT> (&numbers)[kCount],
                   Json& description) {
  for (const auto& number : numbers) description[number.name] = config.*number.member;
}

SequenceId sequence_id(const Json& value, const std::string& what) {
  return integer(value, std::numeric_limits<SequenceId>::min(),
                 std::numeric_limits<SequenceId>::max(), what);
}

struct Flags {
  bool sinks = false;
  bool alibi = false;
};

Flags read_attention(const Json& description, AttentionConfig& config) {
  read_numbers(description, kAttentionNumbers, "attention", config);
  if (config.num_q_heads % config.num_kv_heads != 0) {
    throw InputError(
        fmt::format("attention.num_heads: wanted a multiple of num_heads_kv {}, got {}",
                    config.num_kv_heads, config.num_q_heads));
  }
  // Scales of 0 and below mean nothing sensible; 0 is the library's word for its default.
  constexpr double kSmallest = std::numeric_limits<float>::min();
  if (const Json* scale = optional_member(description, "softmax_scale")) {
    config.softmax_scale =
        static_cast<float>(finite_number(*scale, kSmallest, kFloatMax, "attention.softmax_scale"));
  } else {
    config.softmax_scale =
        static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
  }
  if (const Json* mask = optional_member(description, "mask")) {
    config.mask = word(*mask, kMasks, "attention.mask");
  }
  if (const Json* window = optional_member(description, "window")) {
    const std::string what = "attention.window";
    config.window.left = integer(pair(*window, what)[0], -1, kMaxInt32, what);
    config.window.right = integer((*window)[1], -1, kMaxInt32, what);
  }
  if (const Json* softcap = optional_member(description, "softcap")) {
    config.softcap =
        static_cast<float>(finite_number(*softcap, 0.0, kFloatMax, "attention.softcap"));
  }
  Flags flags;
  if (const Json* sinks = optional_member(description, "sinks")) {
    flags.sinks = boolean(*sinks, "attention.sinks");
  }
  if (const Json* alibi = optional_member(description, "alibi")) {
    flags.alibi = boolean(*alibi, "attention.alibi");
  }
  return flags;
}

void read_cache(const Json& description, CacheConfig& config) {
  config.kind = word(member(description, "kind", "cache"), kCacheKinds, "cache.kind");
  read_numbers(description, kCacheNumbers, "cache", config);
  read_numbers(description, kCacheLengths, "cache", config);
}

CaseStep read_step(const Json& description, const std::string& what) {
  CaseStep step;
  const auto pairs = [&](const char* key, auto&& take) {
    const Json* list = optional_member(object(description, what), key);
    if (list == nullptr) return;
    const std::string where = fmt::format("{}.{}", what, key);
    for (const Json& entry : array(*list, where)) take(pair(entry, where), where);
  };
  if (const Json* list = optional_member(object(description, what), "release")) {
    for (const Json& id : array(*list, what + ".release")) {
      step.release.push_back(sequence_id(id, what + ".release"));
    }
  }
  pairs("fork", [&](const Json& entry, const std::string& where) {
    step.fork.push_back({sequence_id(entry[0], where), sequence_id(entry[1], where)});
  });
  pairs("truncate", [&](const Json& entry, const std::string& where) {
    step.truncate.push_back({sequence_id(entry[0], where), integer(entry[1], 0, kMaxInt32, where)});
  });
  member(description, "sequences", what);
  pairs("sequences", [&](const Json& entry, const std::string& where) {
    step.sequences.push_back(
        {sequence_id(entry[0], where), integer(entry[1], 0, kMaxInt32, where)});
  });
  return step;
}

const char* stored_name(DType dtype) {
  if (dtype == DType::F16) return "F16";
  return dtype == DType::BF16 ? "BF16" : "F32";
}

HostTensor take_tensor(const SafeTensors& file, const std::string& name, DType dtype,
                       const std::vector<std::int64_t>& shape) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    throw InputError(fmt::format("tensor '{}': wanted {} [{}], got none", name, stored_name(dtype),
                                 fmt::join(shape, ", ")));
  }
  const StoredTensor& stored = found->second;
  if (stored.dtype != stored_name(dtype) || stored.shape != shape) {
    throw InputError(fmt::format("tensor '{}': wanted {} [{}], got {} [{}]", name,
                                 stored_name(dtype), fmt::join(shape, ", "), stored.dtype,
                                 fmt::join(stored.shape, ", ")));
  }
  HostTensor tensor(dtype, shape);
  if (!stored.bytes.empty()) std::memcpy(tensor.data(), stored.bytes.data(), stored.bytes.size());
  return tensor;
}

void take_tensors(const SafeTensors& file, const std::string& prefix, const Case& value,
                  bool lse_required, CaseStep& step) {
  const AttentionConfig& a = value.attention;
  const auto shape = [&](std::int32_t heads, std::int32_t dim) {
    return shape_of(step, value.format, heads, dim);
  };
  step.q = take_tensor(file, prefix + ".q", value.dtype, shape(a.num_q_heads, a.head_dim));
  step.k = take_tensor(file, prefix + ".k", value.dtype, shape(a.num_kv_heads, a.head_dim));
  step.v = take_tensor(file, prefix + ".v", value.dtype, shape(a.num_kv_heads, a.head_dim_v));
  step.out = take_tensor(file, prefix + ".out", DType::F32, shape(a.num_q_heads, a.head_dim_v));
  if (lse_required || file.tensors().count(prefix + ".lse") != 0) {
    step.lse =
        take_tensor(file, prefix + ".lse", DType::F32, {total_new_tokens(step), a.num_q_heads});
  }
}

Tolerance read_tolerance(const Json& description) {
  Tolerance tolerance;
  const auto part = [&](const char* key) {
    return finite_number(member(description, key, "tolerance"), 0.0, kFloatMax,
                         fmt::format("tolerance.{}", key));
  };
  tolerance.atol = part("atol");
  tolerance.rtol = part("rtol");
  tolerance.rms = part("rms");
  return tolerance;
}

}  // namespace

Case case_from(const SafeTensors& file) {
  const auto metadata = file.metadata().find(kDescriptionKey);
  if (metadata == file.metadata().end()) {
    throw InputError(fmt::format("__metadata__: wanted '{}', got none: no case", kDescriptionKey));
  }
  const Json description = parse_json_object(metadata->second, kDescriptionKey);
  const auto part = [&](const char* key) -> const Json& {
    return member(description, key, kDescriptionKey);
  };
  integer(part("version"), kVersion, kVersion, "version");

  Case value;
  if (const Json* name = optional_member(description, "name")) value.name = text(*name, "name");
  if (const Json* guards = optional_member(description, "guards")) {
    value.guards = text(*guards, "guards");
  }
  value.dtype = word(part("dtype"), kCaseDtypes, "dtype");
  value.format = word(part("format"), kFormats, "format");
  if (const Json* compute = optional_member(description, "compute")) {
    const std::string got = text(*compute, "compute");
    const char* same = spelling(value.dtype, kCaseDtypes);
    if (got == kComputeFp8) {
      value.attention.compute = Compute::Fp8;
    } else if (got != same) {
      throw InputError(
          fmt::format("compute: wanted {} or {}, got '{}'", same, kComputeFp8, printable(got)));
    }
  }
  const Flags flags = read_attention(object(part("attention"), "attention"), value.attention);
  read_cache(object(part("cache"), "cache"), value.cache);
  value.cache.num_kv_heads = value.attention.num_kv_heads;
  value.cache.head_dim = value.attention.head_dim;
  value.cache.head_dim_v = value.attention.head_dim_v;
  value.cache.dtype = value.dtype;
  const Json* tolerance = optional_member(description, "tolerance");
  value.tolerance = tolerance != nullptr ? read_tolerance(object(*tolerance, "tolerance"))
                                         : tolerance_of(value.dtype, value.attention.compute);

  if (flags.sinks) {
    value.sinks = take_tensor(file, "sinks", DType::F32, {value.attention.num_q_heads});
  }
  if (flags.alibi) {
    value.alibi_slopes =
        take_tensor(file, "alibi_slopes", DType::F32, {value.attention.num_q_heads});
  }
  Lives lives;
  for (const Json& entry : array(part("steps"), "steps")) {
    const std::size_t index = value.steps.size();
    CaseStep step = read_step(entry, fmt::format("steps[{}]", index));
    try {
      lives.apply(step);
    } catch (const InputError& error) {
      throw InputError(fmt::format("steps[{}].{}", index, error.what()));
    }
    take_tensors(file, fmt::format("step{}", index), value, !flags.sinks, step);
    value.steps.push_back(std::move(step));
  }
  return value;
}

Case read_case(const std::filesystem::path& path) { return case_from(SafeTensors::read(path)); }

std::vector<std::byte> write_case(const Case& value) {
  Json attention = {
      {"softmax_scale", value.attention.softmax_scale},
      {"mask", spelling(value.attention.mask, kMasks)},
      {"window", {value.attention.window.left, value.attention.window.right}},
      {"softcap", value.attention.softcap},
      {"sinks", value.sinks.has_value()},
      {"alibi", value.alibi_slopes.has_value()},
  };
  write_numbers(value.attention, kAttentionNumbers, attention);
  Json cache = {{"kind", spelling(value.cache.kind, kCacheKinds)}};
  write_numbers(value.cache, kCacheNumbers, cache);
  write_numbers(value.cache, kCacheLengths, cache);

  std::map<std::string, StoredTensor> tensors;
  const auto put = [&](const std::string& name, const HostTensor& tensor) {
    tensors[name] = {stored_name(tensor.dtype()),
                     tensor.shape(),
                     {tensor.data(), static_cast<std::size_t>(tensor.num_bytes())}};
  };
  if (value.sinks) put("sinks", *value.sinks);
  if (value.alibi_slopes) put("alibi_slopes", *value.alibi_slopes);
  Json steps = Json::array();
  for (const CaseStep& step : value.steps) {
    const std::string prefix = fmt::format("step{}", steps.size());
    put(prefix + ".q", step.q);
    put(prefix + ".k", step.k);
    put(prefix + ".v", step.v);
    put(prefix + ".out", step.out);
    if (step.lse) put(prefix + ".lse", *step.lse);
    Json entry = {{"sequences", Json::array()}};
    for (const SequenceId id : step.release) entry["release"].push_back(id);
    for (const auto& fork : step.fork) entry["fork"].push_back({fork.from, fork.to});
    for (const auto& cut : step.truncate) entry["truncate"].push_back({cut.id, cut.length});
    for (const auto& sequence : step.sequences) {
      entry["sequences"].push_back({sequence.id, sequence.new_tokens});
    }
    steps.push_back(std::move(entry));
  }
  const char* dtype = spelling(value.dtype, kCaseDtypes);
  const Json description = {
      {"version", kVersion},
      {"name", value.name},
      {"guards", value.guards},
      {"dtype", dtype},
      {"compute", value.attention.compute == Compute::Fp8 ? kComputeFp8 : dtype},
      {"format", spelling(value.format, kFormats)},
      {"attention", attention},
      {"cache", cache},
      {"steps", steps},
      {"tolerance",
       {{"atol", value.tolerance.atol},
        {"rtol", value.tolerance.rtol},
        {"rms", value.tolerance.rms}}},
  };
  return write_safetensors(tensors, {{kDescriptionKey, description.dump()}});
}

}  // namespace octavo::testkit
