#include <mlx/backend/cuda/cuda.h>

#include "gather/device.h"

namespace prefixcache::gather {

const DeviceGather* cuda_gather() {
  static const KernelGather gather("cuda", KernelLanguage::cuda, [](const KernelText& text) {
    return mlx::core::fast::cuda_kernel(text.name, text.inputs, text.outputs, text.source, text.header, false);
  });
  return mlx::core::cu::is_available() ? &gather : nullptr;
}

}  // namespace prefixcache::gather
