// bfloat16 kernels for CPUs with AVX-512 and AVX512_BF16, and AMX where it exists: the parts of a decoder layer between
// the matrix products.
//
// A text of a hundred tokens is too small for general kernels: their set-up costs more than the arithmetic. Here one call
// serves a whole packed batch. Every pointer is to bfloat16 unless its type says otherwise; strides count elements.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// Threads that help where they can. The caller works through the chunks itself and waits only for chunks a helper has
// begun, never for a helper that is not scheduled: beside busy neighbours a barrier of all threads costs milliseconds.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { serve(); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }
  int threads() const { return int(helpers_.size()) + 1; }

  // work(chunk) for every chunk in [0, chunks), in about that order. One caller at a time.
  template <typename Work>
  void run(long chunks, const Work& work) {
    if (helpers_.empty() || chunks < 2) {
      for (long i = 0; i < chunks; ++i) work(i);
      return;
    }
    const uint64_t job = ++job_ << 32;
    // Closed while its fields change, so that a late helper of the last job cannot claim a chunk of this one.
    next_.store(job | 0xffffffff);
    call_ = [](const void* w, long i) { (*static_cast<const Work*>(w))(i); };
    work_ = &work, chunks_ = chunks, done_ = 0;
    next_.store(job);
    {
      std::lock_guard lock(mutex_);
      ++posted_;
    }
    wake_.notify_all();
    help();
    while (done_.load(std::memory_order_acquire) < chunks) _mm_pause();
  }

 private:
  void help() {
    for (uint64_t seen = next_.load();;) {
      const long chunk = long(seen & 0xffffffff);
      if (chunk >= chunks_.load()) return;
      if (!next_.compare_exchange_weak(seen, seen + 1)) continue;
      call_(work_, chunk);
      done_.fetch_add(1, std::memory_order_release);
      seen = next_.load();
    }
  }
  void serve() {
    std::unique_lock lock(mutex_);
    for (uint64_t handled = 0;;) {
      wake_.wait(lock, [&] { return stopping_ || posted_ != handled; });
      if (stopping_) return;
      handled = posted_;
      lock.unlock();
      help();
      lock.lock();
    }
  }

  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  uint64_t posted_ = 0, job_ = 0;
  std::atomic<uint64_t> next_{0xffffffff};  // job number, then the next chunk in the low half
  std::atomic<long> chunks_{0}, done_{0};
  void (*call_)(const void*, long) = nullptr;
  const void* work_ = nullptr;
};

// Rows in chunks small enough to balance, large enough not to matter.
template <typename Work>
void for_rows(Pool& pool, long rows, const Work& work) {
  const long step = std::max<long>(16, (rows + pool.threads() * 8 - 1) / (pool.threads() * 8));
  pool.run((rows + step - 1) / step, [&](long chunk) {
    for (long row = chunk * step; row < std::min(rows, (chunk + 1) * step); ++row) work(row);
  });
}

using bf16 = uint16_t;

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

// 2^x for x <= 0; relative error below 2^-17, far under bfloat16's rounding (a Chebyshev polynomial over [-1/2, 1/2]).
inline __m512 exp2_ps(__m512 x) {
  // The floor keeps results normal: subnormal ones cost a hundred cycles each.
  x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.66637e-3f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.592198e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.4022349e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.9312105e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMasked = -1e30f;
constexpr int kKeys = 64;  // keys a block: two tiles of 32 for P V, four of 16 for Q K^T
constexpr int kMaxDim = 256;

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16;
  }
};
#endif

// Transpose a 16 x 16 block of 32-bit values: in[r] is row r.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  T* at_least(size_t count) {
    if (count > size) {
      std::free(data);
      size = (count + 63) / 64 * 64;
      data = static_cast<T*>(std::aligned_alloc(64, size * sizeof(T)));
    }
    return data;
  }
};

// One thread's memory, kept between calls. Tiles are 1 KiB: 16 rows of 64 bytes.
struct alignas(64) Scratch {
  bf16 k[kKeys * kMaxDim];  // [key tile of 16][dim tile of 32]: 16 dim pairs x 16 keys x 2
  bf16 v[kKeys * kMaxDim];  // [key tile of 32][dim tile of 16]: 16 key pairs x 16 dims x 2
  float s[16 * kKeys];
  bf16 p[16 * kKeys];
  Buffer<bf16> q_buffer;
  Buffer<float> o_buffer, m_buffer, l_buffer;
  Buffer<int> position_buffer;
  bf16* q;        // [rows, dim]
  float* o;       // [rows, dim]
  float* m;       // [rows] running maximum, times log2(e)
  float* l;       // [rows] running sum
  int* position;  // [rows] position of the row's token in its text
  void reserve(size_t rows, size_t dim) {
    q = q_buffer.at_least(rows * dim), o = o_buffer.at_least(rows * dim);
    m = m_buffer.at_least(rows), l = l_buffer.at_least(rows), position = position_buffer.at_least(rows);
  }
};

// Rows of one head lie a page apart, where the hardware does not prefetch.
inline void prefetch(const bf16* row, int dim) {
  for (int d = 0; d < dim; d += 32) _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T0);
}

void pack_keys(const bf16* k, long stride, int count, int dim, bf16* out) {
  for (int key = 0; key < kKeys; key += 16) {
    for (int row = key + 16; row < std::min(count, key + 32); ++row) prefetch(k + row * stride, dim);
    for (int d = 0; d < dim; d += 32) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = key + i < count ? _mm512_loadu_si512(k + (key + i) * stride + d) : _mm512_setzero_si512();
      transpose16(rows);
      for (int i = 0; i < 16; ++i, out += 32) _mm512_store_si512(out, rows[i]);
    }
  }
}

void pack_values(const bf16* v, long stride, int count, int dim, bf16* out) {
  for (int key = 0; key < kKeys; key += 32) {
    for (int d = 0; d < dim; d += 16) {
      for (int i = 0; i < 16; ++i, out += 32) {
        const int row = key + 2 * i;
        const __m256i zero = _mm256_setzero_si256();
        const auto at = [&](int r) {
          return r < count ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + r * stride + d)) : zero;
        };
        const __m512i even = _mm512_cvtepu16_epi32(at(row));
        const __m512i odd = _mm512_slli_epi32(_mm512_cvtepu16_epi32(at(row + 1)), 16);
        _mm512_store_si512(out, _mm512_or_si512(even, odd));
      }
    }
  }
}

#ifdef __AMX_BF16__
// GCC's tile intrinsics do not tell the compiler that they read memory: without this it may move stores past them.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// s[16][16 columns] = q[16][dim] k^T, for the first `columns` tiles of 16 keys.
template <int columns>
inline void scores(const bf16* q, const bf16* k, int dim, float* s) {
  const int steps = dim / 32;
  memory_barrier();
  _tile_zero(0);
  if constexpr (columns > 1) _tile_zero(1);
  if constexpr (columns > 2) _tile_zero(2);
  if constexpr (columns > 3) _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const bf16* block = k + step * 512;
    _tile_loadd(4, q + step * 32, dim * 2);
    _tile_loadd(5, block, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (columns > 1) {
      _tile_loadd(6, block + steps * 512, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (columns > 2) {
      _tile_loadd(7, block + steps * 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (columns > 3) {
      _tile_loadd(5, block + steps * 1536, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, s, kKeys * 4);
  if constexpr (columns > 1) _tile_stored(1, s + 16, kKeys * 4);
  if constexpr (columns > 2) _tile_stored(2, s + 32, kKeys * 4);
  if constexpr (columns > 3) _tile_stored(3, s + 48, kKeys * 4);
  memory_barrier();
}

// o[16][dim] += p[16][32 key_tiles] v; o is taken as zero where `first`.
inline void weigh(const bf16* p, const bf16* v, int dim, float* o, int key_tiles, bool first) {
  const int columns = dim / 16;
  memory_barrier();
  for (int c = 0; c < columns; c += 2) {
    if (first) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, o + c * 16, dim * 4);
      _tile_loadd(1, o + c * 16 + 16, dim * 4);
    }
    for (int t = 0; t < key_tiles; ++t) {
      const bf16* block = v + (t * columns + c) * 512;
      _tile_loadd(4, p + t * 32, kKeys * 2);
      _tile_loadd(5, block, 64);
      _tile_loadd(6, block + 512, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, o + c * 16, dim * 4);
    _tile_stored(1, o + c * 16 + 16, dim * 4);
  }
  memory_barrier();
}
#else
// s[16][16 columns] = q[16][dim] k^T, for the first `columns` tiles of 16 keys. Four rows at a time: each pair of a row's
// values is multiplied with 16 keys at once, and every loaded key serves four rows.
template <int columns>
inline void scores(const bf16* q, const bf16* k, int dim, float* s) {
  const int pairs = dim / 2;
  for (int r = 0; r < 16; r += 4) {
    const int32_t* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = reinterpret_cast<const int32_t*>(q + (r + i) * dim);
    __m512 sum[4][columns];
    for (auto& row : sum)
      for (auto& value : row) value = _mm512_setzero_ps();
    for (int pair = 0; pair < pairs; ++pair) {
      __m512bh keys[columns];
      for (int c = 0; c < columns; ++c) keys[c] = (__m512bh)_mm512_load_si512(k + c * 16 * dim + pair * 32);
      for (int i = 0; i < 4; ++i) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(rows[i][pair]);
        for (int c = 0; c < columns; ++c) sum[i][c] = _mm512_dpbf16_ps(sum[i][c], keys[c], both);
      }
    }
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < columns; ++c) _mm512_store_ps(s + (r + i) * kKeys + c * 16, sum[i][c]);
  }
}

// o[16][dim] += p[16][32 key_tiles] v; o is taken as zero where `first`.
inline void weigh(const bf16* p, const bf16* v, int dim, float* o, int key_tiles, bool first) {
  const int columns = dim / 16;
  for (int r = 0; r < 16; r += 4) {
    for (int c = 0; c < columns; c += 2) {
      __m512 sum[4][2];
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j)
          sum[i][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(o + (r + i) * dim + (c + j) * 16);
      for (int t = 0; t < key_tiles; ++t) {
        const bf16* block = v + (t * columns + c) * 512;
        for (int pair = 0; pair < 16; ++pair) {
          const __m512bh left = (__m512bh)_mm512_load_si512(block + pair * 32);
          const __m512bh right = (__m512bh)_mm512_load_si512(block + 512 + pair * 32);
          for (int i = 0; i < 4; ++i) {
            const int32_t* row = reinterpret_cast<const int32_t*>(p + (r + i) * kKeys + t * 32);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(row[pair]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, both);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], right, both);
          }
        }
      }
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) _mm512_store_ps(o + (r + i) * dim + (c + j) * 16, sum[i][j]);
    }
  }
}
#endif

struct Problem {
  const bf16 *q, *k, *v;
  long q_stride, kv_stride;
  bf16* out;
  long out_stride;
  int heads, kv_heads, dim, causal, window;
  float scale;
};

// One tile's softmax weights over `columns` tiles of 16 keys from `key`: s to p, the running m and l, and o rescaled.
template <int columns>
inline void soften(const Problem& a, Scratch& w, int tile, int key, int keys, bool masked, bool first) {
  const __m512 scale = _mm512_set1_ps(a.scale * kLog2e);
  float* o = w.o + long(tile) * 16 * a.dim;
  for (int r = 0; r < 16; ++r) {
    const int row = tile * 16 + r, position = w.position[row];
    __m512 x[columns];
    for (int i = 0; i < columns; ++i) x[i] = _mm512_mul_ps(_mm512_load_ps(w.s + r * kKeys + i * 16), scale);
    if (masked) {
      const int end = a.causal ? std::min(keys, position - key + 1) : keys;
      const int begin = a.window ? std::max(0, position - a.window + 1 - key) : 0;
      const uint64_t upto = end <= 0 ? 0 : end >= 64 ? ~0ull : (1ull << end) - 1;
      const uint64_t keep = begin >= 64 ? 0 : upto & (~0ull << begin);
      for (int i = 0; i < columns; ++i)
        x[i] = _mm512_mask_blend_ps(__mmask16(keep >> (16 * i)), _mm512_set1_ps(kMasked), x[i]);
    }
    __m512 top = x[0];
    for (int i = 1; i < columns; ++i) top = _mm512_max_ps(top, x[i]);
    const float before = w.m[row], peak = std::max(before, _mm512_reduce_max_ps(top));
    const __m512 shift = _mm512_set1_ps(peak);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < columns; ++i) {
      x[i] = exp2_ps(_mm512_sub_ps(x[i], shift));
      sum = _mm512_add_ps(sum, x[i]);
      store(w.p + r * kKeys + i * 16, x[i]);
    }
    if constexpr (columns % 2 == 1)
      _mm256_store_si256(reinterpret_cast<__m256i*>(w.p + r * kKeys + columns * 16), _mm256_setzero_si256());
    if (!first && peak > before) {
      const float shrink = std::exp2(std::max(before - peak, -100.0f));
      const __m512 factor = _mm512_set1_ps(shrink);
      w.l[row] *= shrink;
      for (int d = 0; d < a.dim; d += 16)
        _mm512_store_ps(o + r * a.dim + d, _mm512_mul_ps(_mm512_load_ps(o + r * a.dim + d), factor));
    }
    w.m[row] = peak;
    w.l[row] += _mm512_reduce_add_ps(sum);
  }
}

template <int columns>
inline void block(const Problem& a, Scratch& w, int tile, int key, int keys, bool masked, bool first) {
  scores<columns>(w.q + long(tile) * 16 * a.dim, w.k, a.dim, w.s);
  soften<columns>(a, w, tile, key, keys, masked, first);
  weigh(w.p, w.v, a.dim, w.o + long(tile) * 16 * a.dim, (columns + 1) / 2, first);
}

// Rows [first, first + count) of one text's queries, for the query heads that share kv_head. `length` keys from `start`.
void attend(const Problem& a, Scratch& w, long q_row, long start, int length, int first, int count, int kv_head) {
  const int group = a.heads / a.kv_heads, dim = a.dim, rows = group * count, tiles = (rows + 15) / 16;
  int row = 0;
  for (int h = 0; h < group; ++h) {
    const bf16* q = a.q + q_row * a.q_stride + (kv_head * group + h) * dim;
    for (int t = 0; t < count; ++t, ++row, q += a.q_stride) {
      w.position[row] = first + t, w.m[row] = kMasked, w.l[row] = 0.0f;
      if (t + 16 < count) prefetch(q + 16 * a.q_stride, dim);
      for (int d = 0; d < dim; d += 32) _mm512_store_si512(w.q + long(row) * dim + d, _mm512_loadu_si512(q + d));
    }
  }
  for (; row < tiles * 16; ++row) {
    w.position[row] = first + count - 1, w.m[row] = kMasked, w.l[row] = 0.0f;
    std::memset(w.q + long(row) * dim, 0, dim * 2);
  }
  const int last_key = a.causal ? std::min(length, first + count) : length;
  const int first_key = a.window ? std::max(0, first - a.window + 1) / kKeys * kKeys : 0;
  const bf16* k = a.k + start * a.kv_stride + kv_head * dim;
  const bf16* v = a.v + start * a.kv_stride + kv_head * dim;
  for (int key = first_key; key < last_key; key += kKeys) {
    const int keys = std::min(kKeys, length - key);
    for (int r = 0; r < keys; ++r) prefetch(v + (key + r) * a.kv_stride, dim);
    pack_keys(k + key * a.kv_stride, a.kv_stride, keys, dim, w.k);
    pack_values(v + key * a.kv_stride, a.kv_stride, keys, dim, w.v);
    for (int tile = 0; tile < tiles; ++tile) {
      const int* position = w.position + tile * 16;
      int low = position[0], high = position[0];
      for (int r = 1; r < 16; ++r) low = std::min(low, position[r]), high = std::max(high, position[r]);
      if (a.causal && high < key) continue;
      const int needed = a.causal ? std::min(keys, high - key + 1) : keys;
      const bool masked = keys < kKeys || (a.causal && low < key + kKeys - 1) || a.window;
      switch ((needed + 15) / 16) {
        case 1: block<1>(a, w, tile, key, keys, masked, key == first_key); break;
        case 2: block<2>(a, w, tile, key, keys, masked, key == first_key); break;
        case 3: block<3>(a, w, tile, key, keys, masked, key == first_key); break;
        default: block<4>(a, w, tile, key, keys, masked, key == first_key);
      }
    }
  }
  row = 0;
  for (int h = 0; h < group; ++h) {
    bf16* out = a.out + q_row * a.out_stride + (kv_head * group + h) * dim;
    for (int t = 0; t < count; ++t, ++row, out += a.out_stride) {
      const __m512 factor = _mm512_set1_ps(1.0f / w.l[row]);
      const float* o = w.o + long(row) * dim;
      for (int d = 0; d < dim; d += 16) store(out + d, _mm512_mul_ps(_mm512_load_ps(o + d), factor));
    }
  }
}

inline float sum_squares(const bf16* x, int n) {
  __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 32) {
    const __m512 u = load(x + i), v = load(x + i + 16);
    a = _mm512_fmadd_ps(u, u, a), b = _mm512_fmadd_ps(v, v, b);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(a, b));
}

}  // namespace

extern "C" {

// Ask the kernel for AMX tile state. 1 where this process may use it, or where it was compiled without.
int embedq_enable() {
#ifdef __AMX_BF16__
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return 1;
#endif
}

void* embedq_pool_create(int threads) { return new Pool(threads); }
void embedq_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

// Attention within packed texts: text i has the rows of q and out from cu_rows[i] to cu_rows[i + 1], which are its last
// tokens, and the keys from cu_seqlens[i] to cu_seqlens[i + 1]; both int32 [n + 1]. Texts longer than `longest` are left
// out. dim is a multiple of 32, at most 256.
void embedq_attention(void* pool, const bf16* q, long q_stride, const bf16* k, const bf16* v, long kv_stride, bf16* out,
                      long out_stride, const int32_t* cu_rows, const int32_t* cu_seqlens, int n, int heads, int kv_heads,
                      int dim, int causal, int window, int longest) {
  const Problem problem{q,          k,     v,        q_stride, kv_stride, out,
                        out_stride, heads, kv_heads, dim,      causal,    window, 1.0f / std::sqrt(float(dim))};
  constexpr int kChunk = 128;  // queries a task: packing a block of keys serves all of them
  struct Task {
    int text, first, count;
  };
  std::vector<Task> tasks;
  for (int i = 0; i < n; ++i) {
    const int rows = cu_rows[i + 1] - cu_rows[i];
    if (cu_seqlens[i + 1] - cu_seqlens[i] > longest) continue;
    // The last chunk of a causal text reads the most keys, so it starts first.
    for (int first = (rows - 1) / kChunk * kChunk; first >= 0; first -= kChunk)
      tasks.push_back({i, first, std::min(kChunk, rows - first)});
  }
  auto& workers = *static_cast<Pool*>(pool);
  // A thread takes several heads of a chunk where there are chunks enough: their rows share pages.
  long heads_each = std::clamp<long>(long(tasks.size()) / (4 * workers.threads()), 1, kv_heads);
  while (kv_heads % heads_each) --heads_each;
  const long parts = kv_heads / heads_each, group = heads / kv_heads;
  workers.run(long(tasks.size()) * parts, [&](long index) {
    thread_local Scratch scratch;
#ifdef __AMX_BF16__
    const TileConfig config;
    _tile_loadconfig(&config);
#endif
    const Task task = tasks[index / parts];
    const long start = cu_seqlens[task.text], row = cu_rows[task.text];
    const int length = cu_seqlens[task.text + 1] - cu_seqlens[task.text];
    const int before = length - (cu_rows[task.text + 1] - cu_rows[task.text]);  // keys of tokens without a row
    scratch.reserve((group * task.count + 15) / 16 * 16, dim);
    for (long head = index % parts * heads_each, end = head + heads_each; head < end; ++head)
      attend(problem, scratch, row + task.first, start, length, before + task.first, task.count, int(head));
#ifdef __AMX_BF16__
    _tile_release();
#endif
  });
}

// residual += x (skipped where x is null); out = residual * rsqrt(mean(residual^2) + eps) * weight. n a multiple of 32.
void embedq_add_rms_norm(void* pool, const bf16* x, bf16* residual, const bf16* weight, bf16* out, long tokens, int n,
                         float eps) {
  for_rows(*static_cast<Pool*>(pool), tokens, [&](long t) {
    bf16* r = residual + t * n;
    if (x != nullptr)
      for (int i = 0; i < n; i += 16) store(r + i, _mm512_add_ps(load(r + i), load(x + t * n + i)));
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(sum_squares(r, n) / n + eps));
    for (int i = 0; i < n; i += 16)
      store(out + t * n + i, _mm512_mul_ps(_mm512_mul_ps(load(r + i), factor), load(weight + i)));
  });
}

// In place on x [tokens, q_heads + k_heads, dim] (stride a token): RMSNorm a head by its weight (null: none), then rope by
// cos and sin float32 [tokens, dim / 2]. dim is a multiple of 32.
void embedq_norm_rotate(void* pool, bf16* x, long stride, const bf16* q_weight, const bf16* k_weight, const float* cos,
                        const float* sin, long tokens, int q_heads, int k_heads, int dim, float eps) {
  const int half = dim / 2;
  for_rows(*static_cast<Pool*>(pool), tokens, [&](long t) {
    for (int h = 0; h < q_heads + k_heads; ++h) {
      bf16* head = x + t * stride + h * dim;
      const bf16* weight = h < q_heads ? q_weight : k_weight;
      const bool normed = weight != nullptr;
      const __m512 factor = _mm512_set1_ps(normed ? 1.0f / std::sqrt(sum_squares(head, dim) / dim + eps) : 1.0f);
      for (int i = 0; i < half; i += 16) {
        __m512 a = _mm512_mul_ps(load(head + i), factor), b = _mm512_mul_ps(load(head + half + i), factor);
        if (normed) a = _mm512_mul_ps(a, load(weight + i)), b = _mm512_mul_ps(b, load(weight + half + i));
        const __m512 c = _mm512_loadu_ps(cos + t * half + i), s = _mm512_loadu_ps(sin + t * half + i);
        store(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
      }
    }
  });
}

// gate_up [tokens, 2 n] -> out [tokens, n] = silu(gate) * up. n is a multiple of 16.
void embedq_silu_mul(void* pool, const bf16* gate_up, bf16* out, long tokens, int n) {
  for_rows(*static_cast<Pool*>(pool), tokens, [&](long t) {
    const bf16 *gate = gate_up + t * 2 * n, *up = gate + n;
    for (int i = 0; i < n; i += 16) {
      const __m512 g = load(gate + i), one = _mm512_set1_ps(1.0f);
      // sigmoid from 2^-|x|, so that nothing overflows.
      const __m512 e = exp2_ps(_mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(-kLog2e)));
      const __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
      // The 14-bit reciprocal is finer than bfloat16, and a division costs more than all the rest.
      const __m512 sigmoid =
          _mm512_mul_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_rcp14_ps(_mm512_add_ps(one, e)));
      store(out + t * n + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid), load(up + i)));
    }
  });
}
}
