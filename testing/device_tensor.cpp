// SPDX-License-Identifier: Apache-2.0
#include "testing/device_memory.h"

namespace octavo::testkit {

DeviceTensor::DeviceTensor(Device device, const HostTensor& tensor)
    : memory_(device, tensor.storage().size()) {
  memory_.upload(tensor.storage().data(), tensor.storage().size());
  HostTensor shape_only = tensor;
  view_ = shape_only.view();
  view_.device = device;
  view_.data = memory_.data() + (tensor.data() - tensor.storage().data());
}

void DeviceTensor::download(HostTensor& to) const {
  memory_.download(to.storage().data(), to.storage().size());
}

}  // namespace octavo::testkit
