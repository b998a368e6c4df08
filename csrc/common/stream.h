// A CUDA stream as plain host code sees it.
#pragma once

struct CUstream_st;

namespace megappo {
using Stream = CUstream_st*;
}
