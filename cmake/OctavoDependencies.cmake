# SPDX-License-Identifier: Apache-2.0
# What the library itself stands on. Found, never fetched. Programs and tests look for the rest
# beside their own targets, so that a user of the library needs none of it.

find_package(fmt 9 REQUIRED)
find_package(hwy 1.0 REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
