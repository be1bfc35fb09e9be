// Dequantizes weights in GGUF's block formats from a file's bytes, or packs them for the kernels.
//
// ggml's ggml-common.h defines the bytes. The products of a code and its scales and of a minimum
// and its scales are exact in float32, so compilers may fuse them with additions.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "operators.h"

namespace {

constexpr int kHalf = kBlock / 2;
constexpr int kChunkBytes = 8192;  // of a panel at a time, to stay in the first cache
typedef uint8_t HalfBlock __attribute__((vector_size(kHalf)));
typedef uint32_t FourWords __attribute__((vector_size(kHalf)));

// A unit of an output. 8-bit codes, and Q6_K's integer scales, are signed.
template <class K>
struct StoredUnit {
  static constexpr int kBlocks = K::kUnitBlocks;
  static constexpr int kHighBytes = (K::kBits - 4) * kBlocks * kBlock / 8;
  static constexpr int kBytes = 2 * (1 + K::kHasMin) + kBlocks * kBlock * K::kBits / 8 +
                                (K::kBits == 6 ? 16 : K::kSuper ? 12 : 0);

  alignas(64) uint8_t codes[kBlocks * kBlock];
  uint16_t outer[kLanes];  // scale and minimum; zeros pad to one vector
  uint8_t scales[kBlocks * K::kGroups], mins[kBlocks];

  void read(const uint8_t* from) {
    if constexpr (K::kBits == 6) return read_q6_k(from);
    std::memcpy(outer, from, 2 * (1 + K::kHasMin));
    from += 2 * (1 + K::kHasMin);
    if constexpr (K::kSuper) {
      read_small(from);
      from += 12;
    }
    if constexpr (K::kBits == 8) {
      std::memcpy(codes, from, sizeof codes);
    } else {
      read_low(from + kHighBytes);
      if constexpr (K::kBits == 5) read_high(from);
    }
  }

 private:
  // Two blocks, or the halves of one, share bytes.
  void read_low(const uint8_t* low) {
    constexpr int kApart = K::kSuper ? kBlock : kHalf;
    for (int at = 0; at < kBlocks * kBlock; at += 2 * kApart)
      for (int i = 0; i < kApart; i += kHalf) {
        const auto both = load<HalfBlock>(low + at / 2 + i);
        store(codes + at + i, both & 15);
        store(codes + at + kApart + i, both >> 4);
      }
  }

  void read_high(const uint8_t* high) {
    if constexpr (K::kSuper) {  // bit b of a byte belongs to block b
      for (int at = 0; at < kBlock; at += kHalf) {
        const auto bits = load<HalfBlock>(high + at);
#pragma GCC unroll 8
        for (int b = 0; b < kBlocks; b++)
          add(codes + b * kBlock + at, (b < 4 ? bits << (4 - b) : bits >> (b - 4)) & 16);
      }
    } else {
      const auto bits = load<uint32_t>(high);
      for (int at = 0; at < kBlock; at += kHalf) {
        const FourWords fours = (FourWords{} + (bits >> at)) >> FourWords{0, 4, 8, 12} & 15;
        add(codes + at, (fours * 0x00204081 & 0x01010101) << 4);  // a bit becomes a byte
      }
    }
  }

  // Unpacks 6-bit scales and minima from 12 bytes.
  void read_small(const uint8_t* packed) {
    const auto first = load<uint32_t>(packed), second = load<uint32_t>(packed + 4);
    const auto third = load<uint32_t>(packed + 8);
    constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTop = 0x30303030;
    store(scales, first & kSix);
    store(scales + 4, (third & kFour) | (first >> 2 & kTop));
    store(mins, second & kSix);
    store(mins + 4, (third >> 4 & kFour) | (second >> 2 & kTop));
  }

  void read_q6_k(const uint8_t* from) {
    const uint8_t* const high = from + kBlocks * kBlock / 2;
    for (int part = 0; part < 2; part++)
      for (int at = 0; at < kBlock; at += kHalf) {
        const auto crumbs = load<HalfBlock>(high + part * kBlock + at);
        for (int b = 0; b < 2; b++) {
          const auto both = load<HalfBlock>(from + (2 * part + b) * kBlock + at);
          uint8_t* const to = codes + (4 * part + b) * kBlock + at;
          store(to, (both & 15) | (crumbs >> 2 * b << 4 & 0x30));
          store(to + 2 * kBlock, both >> 4 | (crumbs >> 2 * b & 0x30));
        }
      }
    const uint8_t* const rest = high + kBlocks * kBlock / 4;
    std::memcpy(scales, rest, sizeof scales);
    std::memcpy(outer, rest + sizeof scales, 2);
  }

  template <class Bits>
  static void add(uint8_t* to, Bits bits) {
    store(to, load<Bits>(to) | bits);
  }
};

// Outputs' rows, which may lie in several places of a file.
struct StoredRows {
  const uint8_t* const* rows;  // null for zeros
  int64_t row_bytes, count;
};

// Stores the weights of a unit, in the same order of operations as blocks.py.
template <class K, class Element>
void widen_unit(const StoredUnit<K>& unit, typename Element::Stored* to) {
  constexpr float kOffset = K::kHasMin || K::kBits == 8 ? 0 : 1 << (K::kBits - 1);
  using Codes = std::conditional_t<K::kBits == 8, SignedBytes, Bytes>;
  const Floats outer = Float16::load_floats(unit.outer);
  for (int group = 0; group < K::kUnitBlocks * K::kGroups; group++) {
    float scale = outer[0], least = outer[1];
    if constexpr (K::kBits == 6) scale *= static_cast<int8_t>(unit.scales[group]);
    else if constexpr (K::kSuper) scale *= unit.scales[group];
    if constexpr (K::kSuper && K::kHasMin) least = -(least * unit.mins[group]);
#pragma GCC unroll 8
    for (int i = 0; i < K::kGroup; i += kLanes) {
      const int at = group * K::kGroup + i;
      const Ints whole = __builtin_convertvector(load<Codes>(unit.codes + at), Ints);
      Floats wide = __builtin_convertvector(whole, Floats);
      if constexpr (kOffset != 0) wide -= kOffset;
      wide *= scale;
      if constexpr (K::kHasMin) wide += least;
      Element::store_floats(to + at, wide);
    }
  }
}

template <class K, class Element>
void widen(const StoredRows& stored, void* y, int threads) {
  const int64_t units = stored.row_bytes / StoredUnit<K>::kBytes;
  constexpr int kInputs = K::kUnitBlocks * kBlock;
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t output = 0; output < stored.count; output++) {
    const uint8_t* const from = stored.rows[output];
    auto* const to = static_cast<typename Element::Stored*>(y) + output * units * kInputs;
    StoredUnit<K> unit{};
    for (int64_t i = 0; i < units; i++) {
      unit.read(from + i * StoredUnit<K>::kBytes);
      widen_unit<K, Element>(unit, to + i * kInputs);
    }
  }
}

// Stores a block's codes as `Blocks::codes` unpacks them; `to` is a lane of the first vector.
template <class K>
void pack_codes(const uint8_t* codes, uint8_t* to) {
  uint32_t words[K::kBits] = {};
  if constexpr (K::kBits == 8) {
    std::memcpy(words, codes, kBlock);
  } else {
    store(words, (load<HalfBlock>(codes) & 15) | load<HalfBlock>(codes + kHalf) << 4);
    if constexpr (K::kBits > 4) {
      constexpr int kHigh = K::kBits - 4, kEach = 8 / kHigh;  // words that share a byte
      constexpr uint32_t kMask = 0x01010101 * ((1 << kHigh) - 1);
#pragma GCC unroll 8
      for (int t = 0; t < kBlockWords; t++)
        words[4 + t / kEach] |= (load<uint32_t>(codes + 4 * t) >> 4 & kMask) << kHigh * (t % kEach);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < K::kBits; v++) store(to + v * sizeof(Words), words[v]);
}

// Stores an output's unit in its panel's unit.
template <class K>
void pack_unit(const StoredUnit<K>& unit, int output, uint8_t* to) {
  const int vector = output / kLanes, lane = output % kLanes;
  for (int i = 0; i < 1 + K::kHasMin; i++) store(to + (i * kPanel + output) * 2, unit.outer[i]);
  for (int b = 0; b < K::kUnitBlocks; b++) {
    uint8_t* const block = to + K::kUnitScales + b * K::kBlockBytes;
    if constexpr (K::kSuper) {
      for (int group = 0; group < K::kGroups; group++)
        block[group * kPanel + output] = unit.scales[b * K::kGroups + group];
      if constexpr (K::kHasMin) block[K::kGroups * kPanel + output] = unit.mins[b];
    }
    pack_codes<K>(unit.codes + b * kBlock, block + K::kBlockScales +
                                               vector * K::kBits * sizeof(Words) +
                                               lane * sizeof(uint32_t));
  }
}

template <class K>
void pack(const StoredRows& stored, uint8_t* panels, int threads) {
  const int64_t units = stored.row_bytes / StoredUnit<K>::kBytes;
  constexpr int64_t kChunk = std::max(1, kChunkBytes / K::kUnitBytes);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t panel = 0; panel < (stored.count + kPanel - 1) / kPanel; panel++)
    for (int64_t first = 0; first < units; first += kChunk)
      for (int i = 0; i < kPanel; i++) {
        const int64_t output = panel * kPanel + i;
        const uint8_t* const from = output < stored.count ? stored.rows[output] : nullptr;
        StoredUnit<K> unit{};  // zeros for an output that does not exist
        for (int64_t at = first; at < std::min(first + kChunk, units); at++) {
          if (from) unit.read(from + at * StoredUnit<K>::kBytes);
          pack_unit(unit, i, panels + (panel * units + at) * K::kUnitBytes);
        }
      }
}

// The weight's rows: `addresses` has the address of each output's row.
StoredRows stored_rows(const View& addresses, int64_t row_bytes) {
  return {addresses.as<const uint8_t* const>(), row_bytes, addresses.sizes[0]};
}

// Sets y, `[outputs, inputs]` in bfloat16 or float32, to the weights of outputs' rows.
void widen_blocks(const View& y, const View& addresses, int64_t row_bytes, int64_t format) {
  const StoredRows stored = stored_rows(addresses, row_bytes);
  with_format(format, [&](auto kind) {
    using K = decltype(kind);
    if (y.is_float32()) widen<K, Float32>(stored, y.data, num_threads());
    else widen<K, BFloat16>(stored, y.data, num_threads());
  });
}
OCTAVO_OPERATOR(widen_blocks)

// Lays out outputs' rows in panels; outputs are padded with zeros to whole ones.
void pack_blocks(const View& panels, const View& addresses, int64_t row_bytes, int64_t format) {
  with_format(format, [&](auto kind) {
    pack<decltype(kind)>(stored_rows(addresses, row_bytes), panels.as<uint8_t>(), num_threads());
  });
}
OCTAVO_OPERATOR(pack_blocks)

}  // namespace
