// FlashInfer's XQA decode attention as a foreign function of XLA. mha.cu, from FlashInfer's wheel, contains the kernel and its
// launch. Macros that the caller defines set page size, head dim, group, dtype and whether there is a window.
#include "mha.cu"

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// q, out: [rows, heads, head_dim]; k, v: [num_pages, kv_heads, page_size, head_dim]; tables: [rows, width]; lengths: [rows];
// sinks: [heads], or [0] for none; semaphores: zeros before and after the call. Only kernels with a window use `window`.
static ffi::Error Decode(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> tables,
                         ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::S32> semaphores,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::S32>>,
                         ffi::Result<ffi::Buffer<ffi::U8>> workspace, float scale, int32_t window, int32_t cores) {
  auto const rows = q.dimensions()[0], heads = q.dimensions()[1];
  auto const kv_heads = k.dimensions()[1], page_size = k.dimensions()[2], head_dim = k.dimensions()[3];
  if (heads != kv_heads * HEAD_GRP_SIZE || page_size != TOKENS_PER_PAGE || head_dim != HEAD_ELEMS) {
    return ffi::Error::InvalidArgument("this XQA kernel was built for another shape");
  }
  try {
    // Loading this library set the shared memory limit on one device only. Set it on the current device, too.
    checkCuda(cudaFuncSetAttribute(kernel_mha, cudaFuncAttributeMaxDynamicSharedMemorySize, hostSmemSize));
    launchMHAFlashInfer(cores, kv_heads, window, scale * std::sqrt(float(head_dim)), nullptr,
                        static_cast<OutputHead*>(out->untyped_data()), static_cast<InputHead const*>(q.untyped_data()),
                        sinks.element_count() ? sinks.typed_data() : nullptr, static_cast<GMemCacheHead*>(k.untyped_data()),
                        static_cast<GMemCacheHead*>(v.untyped_data()), tables.typed_data(),
                        tables.dimensions()[1] * page_size, reinterpret_cast<uint32_t const*>(lengths.typed_data()), rows, 1.0f,
                        nullptr, reinterpret_cast<uint32_t*>(semaphores.typed_data()),
                        workspace->untyped_data(), /*enable_pdl=*/false, /*stride of a page=*/kv_heads * page_size * head_dim,
                        /*of a token=*/head_dim, /*of a head=*/page_size * head_dim, stream);
  } catch (std::exception const& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(decode, Decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()            // q
                                  .Arg<ffi::AnyBuffer>()            // k
                                  .Arg<ffi::AnyBuffer>()            // v
                                  .Arg<ffi::Buffer<ffi::S32>>()     // tables
                                  .Arg<ffi::Buffer<ffi::S32>>()     // lengths
                                  .Arg<ffi::Buffer<ffi::F32>>()     // sinks
                                  .Arg<ffi::Buffer<ffi::S32>>()     // semaphores
                                  .Ret<ffi::AnyBuffer>()            // out
                                  .Ret<ffi::Buffer<ffi::S32>>()     // semaphores
                                  .Ret<ffi::Buffer<ffi::U8>>()      // workspace
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("cores"),
                              {ffi::Traits::kCmdBufferCompatible});
