// Memory that a thread keeps between calls. It begins with a cache line: each vector of 64 bytes that lies across two
// of them is read twice.

#pragma once

#include <cstddef>
#include <cstdint>

namespace troupe {

// Bytes that grow and keep a name for reports. With TROUPE_GUARD, guard bytes lie on both sides (memory.cpp).
class Buffer {
public:
    explicit Buffer(const char* name) : name_(name) {}
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    const char* name() const { return name_; }
    // Whether the guard bytes are as they were written. True where there are none.
    bool intact() const;

protected:
    // Room for so many bytes, zeros where it is new; it keeps nothing of what was there before.
    void fit(size_t bytes) {
        if (bytes > bytes_ || (bytes != bytes_ && exact())) allocate(bytes);
    }
    void* begin_ = nullptr;

private:
    // Whether room is never larger than asked for, so that a write behind it is seen: in the sanitizers' build and with
    // TROUPE_GUARD.
    static bool exact();
    void allocate(size_t bytes);
    void release();

    const char* const name_;
    size_t bytes_ = 0;
    bool guarded_ = false;
};

// Numbers of one type in a buffer.
template <typename Number>
class Memory : public Buffer {
public:
    explicit Memory(const char* name) : Buffer(name) {}

    void grow(int64_t count) { fit(static_cast<size_t>(count) * sizeof(Number)); }
    Number* data() { return static_cast<Number*>(begin_); }
    const Number* data() const { return static_cast<const Number*>(begin_); }
    operator Number*() { return data(); }
    operator const Number*() const { return data(); }
};

}  // namespace troupe
