// SPDX-License-Identifier: Apache-2.0
#include "testing/json_fields.h"

#include "testing/input_error.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

namespace octavo::testkit {

Json parse_json_object(std::string_view source, const std::string& what) {
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  bool repeats = false;
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        repeats = true;
        repeated = key;
      }
    }
    return true;
  };
  Json parsed = Json::parse(source.begin(), source.end(), watch, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) throw InputError(what + ": wanted JSON, got other text");
  if (repeats) {
    throw InputError(fmt::format("{}: wanted each key of an object once, got '{}' twice", what,
                                 printable(repeated)));
  }
  object(parsed, what);
  return parsed;
}

std::string shown(const Json& value) {
  return value.is_primitive() ? printable(value.dump()) : std::string(value.type_name());
}

const Json& member(const Json& object, const char* key, const std::string& what) {
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(fmt::format("{}: wanted '{}', got none", what, key));
  return *found;
}

const Json* optional_member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::int64_t integer(const Json& value, std::int64_t low, std::int64_t high,
                     const std::string& what) {
  const bool fits = value.is_number_unsigned()
                        ? value.get<std::uint64_t>() <=
                              static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())
                        : value.is_number_integer();
  if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) {
    throw InputError(
        fmt::format("{}: wanted an integer from {} to {}, got {}", what, low, high, shown(value)));
  }
  return value.get<std::int64_t>();
}

double finite_number(const Json& value, double low, double high, const std::string& what) {
  if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) {
    throw InputError(
        fmt::format("{}: wanted a number from {} to {}, got {}", what, low, high, shown(value)));
  }
  return value.get<double>();
}

bool boolean(const Json& value, const std::string& what) {
  if (!value.is_boolean()) {
    throw InputError(fmt::format("{}: wanted true or false, got {}", what, shown(value)));
  }
  return value.get<bool>();
}

std::string text(const Json& value, const std::string& what) {
  if (!value.is_string()) {
    throw InputError(fmt::format("{}: wanted a string, got {}", what, shown(value)));
  }
  return value.get<std::string>();
}

const Json& array(const Json& value, const std::string& what) {
  if (!value.is_array()) {
    throw InputError(fmt::format("{}: wanted an array, got {}", what, shown(value)));
  }
  return value;
}

const Json& object(const Json& value, const std::string& what) {
  if (!value.is_object()) {
    throw InputError(fmt::format("{}: wanted an object, got {}", what, shown(value)));
  }
  return value;
}

const Json& pair(const Json& value, const std::string& what) {
  if (array(value, what).size() != 2) {
    throw InputError(fmt::format("{}: wanted 2 elements, got {}", what, value.size()));
  }
  return value;
}

}  // namespace octavo::testkit
