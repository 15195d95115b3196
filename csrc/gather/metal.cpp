#include <mlx/backend/metal/metal.h>

#include "gather/device.h"

namespace prefixcache::gather {

const DeviceGather* metal_gather() {
  static const KernelGather gather("metal", KernelLanguage::metal, [](const KernelText& text) {
    return mlx::core::fast::metal_kernel(text.name, text.inputs, text.outputs, text.source, text.header, false);
  });
  return mlx::core::metal::is_available() ? &gather : nullptr;
}

}  // namespace prefixcache::gather
