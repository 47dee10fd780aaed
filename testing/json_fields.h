// SPDX-License-Identifier: Apache-2.0
// Reading foreign JSON: every access is checked and every complaint reads "what: wanted …, got …".
// For testing/'s .cpp files; it brings nlohmann-json along.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo::testkit {

using Json = nlohmann::json;

/// An object. Errors: InputError for text that is no JSON object, or names a key twice in one
/// object, which would make it mean two things.
Json parse_json_object(std::string_view text, const std::string& what);

/// A value as a complaint may show it: scalars as they are, of the rest only the kind (a hostile
/// file nests deeper than a recursive printer's stack).
std::string shown(const Json& value);

/// The member of an object. Errors: InputError when it is missing.
const Json& member(const Json& object, const char* key, const std::string& what);

/// The member, or null when it is missing or JSON's null.
const Json* optional_member(const Json& object, const char* key);

std::int64_t integer(const Json& value, std::int64_t low, std::int64_t high,
                     const std::string& what);
double finite_number(const Json& value, double low, double high, const std::string& what);
bool boolean(const Json& value, const std::string& what);
std::string text(const Json& value, const std::string& what);
const Json& array(const Json& value, const std::string& what);
const Json& object(const Json& value, const std::string& what);

/// An array of exactly two integers.
const Json& pair(const Json& value, const std::string& what);

}  // namespace octavo::testkit
