// store_forms.cpp: which parts are alike in names, dtypes and shapes of their tensors, and what is done once for each
// form.
#include <string>

#include "store/gather_plan.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

constexpr std::size_t kMostForms = 256;

std::string form_text(const layout::PartHeader& header, bool with_rows) {
  std::string text;
  for (const auto& tensor : header.tensors) {
    // A name may hold any character: only its length tells where it ends.
    text += std::to_string(tensor.name.size()) + ':' + tensor.name;
    text += std::to_string(static_cast<int>(tensor.dtype.val()));
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      const bool rows = static_cast<int>(d) == tensor.seq_axis;
      text += rows ? '*' : ',';
      if (!rows || with_rows) text += std::to_string(tensor.shape[d]);
    }
    text += ';';
  }
  return text;
}

}  // namespace

std::shared_ptr<const std::string> StoreImpl::form_of(const layout::PartHeader& header) {
  auto form = std::make_shared<const std::string>(form_text(header, true));
  Lock lock(mutex_);
  if (const auto found = forms_.find(*form); found != forms_.end()) return found->second;
  // Those that are forgotten are only not recognised.
  if (forms_.size() >= kMostForms) forms_.clear();
  forms_.emplace(*form, form);  // the key lies in the value
  return form;
}

void StoreImpl::prepare_device(const std::shared_ptr<Image>& image) {
  if (device_ == nullptr || image->buffer == nullptr || image->buffer->slab() == nullptr) return;
  std::string form = form_text(image->header, false);
  {
    Lock lock(mutex_);
    if (prepared_.size() >= kMostForms || !prepared_.insert(std::move(form)).second) return;
  }
  GatherRequest request;
  request.keys = {image->header.key};
  request.part = image->header.part;
  request.row_lo = image->header.row_lo;
  request.row_hi = image->header.row_hi;
  request.capacity = request.row_hi - request.row_lo;
  const Source sources[] = {{image, nullptr, 0}};
  GatherPlan plan;
  std::size_t bad_block = 0;
  if (!GatherPlan::make(request, sources, plan, bad_block).is_ok()) return;
  if (const auto why_not = plan.start(*device_)) {
    Lock lock(mutex_);
    stats_.last_error = *why_not;
  }
}

}  // namespace prefixcache::store
