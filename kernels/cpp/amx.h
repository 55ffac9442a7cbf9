// The processor's tiles (AMX): eight registers of 16 rows of 64 bytes each, and products of two of them that are added to
// a third. Where there are none, or the system does not let this process use them, `amx_allowed` says no.

#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define TROUPE_AMX 1
#include <cstdint>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace troupe {

// The system keeps tiles for those who asked once; the answer is for all threads of the process.
inline bool amx_allowed() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A constant: of what lies in a local variable, compilers take only the first 8 bytes to be read by the instruction.
inline constexpr TileShapes kWholeTiles;

// Configures all tiles of this thread in full size, for its lifetime. No other code may use tiles meanwhile.
class AmxScope {
public:
    AmxScope() { _tile_loadconfig(&kWholeTiles); }
    ~AmxScope() { _tile_release(); }
    AmxScope(const AmxScope&) = delete;
    AmxScope& operator=(const AmxScope&) = delete;
};

}  // namespace troupe

#else

namespace troupe {
inline bool amx_allowed() { return false; }
}  // namespace troupe

#endif
