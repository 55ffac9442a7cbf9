// Memory of `memory.h`, and the guard bytes around it.

#include "memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <set>

#include "refusal.h"

namespace {

using troupe::Buffer;

constexpr std::align_val_t kLine{64};
constexpr size_t kGuardBytes = 64;
constexpr unsigned char kGuard = 0xA5;

bool guards = false;
std::mutex mutex;

// All guarded buffers of all threads. It is never destroyed: threads may end after it would be.
std::set<const Buffer*>& guarded_buffers() {
    static auto* const buffers = new std::set<const Buffer*>;
    return *buffers;
}

bool untouched(const unsigned char* from) {
    return std::all_of(from, from + kGuardBytes, [](unsigned char byte) { return byte == kGuard; });
}

}  // namespace

bool Buffer::exact() {
#if defined(__SANITIZE_ADDRESS__)
    return true;
#else
    return guards;
#endif
}

bool Buffer::intact() const {
    if (!guarded_) return true;
    const auto* const begin = static_cast<const unsigned char*>(begin_);
    return untouched(begin - kGuardBytes) && untouched(begin + bytes_);
}

void Buffer::allocate(size_t bytes) {
    release();
    const size_t guard = guards ? kGuardBytes : 0;
    auto* const memory = static_cast<unsigned char*>(::operator new(bytes + 2 * guard, kLine));
    std::memset(memory, kGuard, guard);
    std::memset(memory + guard, 0, bytes);
    std::memset(memory + guard + bytes, kGuard, guard);
    begin_ = memory + guard, bytes_ = bytes, guarded_ = guards;
    if (!guarded_) return;
    const std::lock_guard<std::mutex> lock(mutex);
    guarded_buffers().insert(this);
}

void Buffer::release() {
    if (begin_ == nullptr) return;
    if (guarded_) {
        const std::lock_guard<std::mutex> lock(mutex);
        guarded_buffers().erase(this);
    }
    ::operator delete(static_cast<unsigned char*>(begin_) - (guarded_ ? kGuardBytes : 0), kLine);
    begin_ = nullptr, bytes_ = 0, guarded_ = false;
}

// From here on buffers have guard bytes. Called before anything else is.
extern "C" const troupe::Refusal* guard_memory() {
    guards = true;
    return nullptr;
}

// The name of a buffer outside of which something was written; null where there is none.
extern "C" const char* broken_guard() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Buffer* buffer : guarded_buffers())
        if (!buffer->intact()) return buffer->name();
    return nullptr;
}
