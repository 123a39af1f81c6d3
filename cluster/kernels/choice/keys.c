/* Keys of noise: one SplitMix64 generator for each seed, key = mix(mix(seed + golden) + position * golden). */
#include "../c/vector.h"

INLINE uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* seeds [requests] at `stride`, first [requests] -> keys [requests, count] at positions first, first + 1, and so on. */
void NAMED(aerie_keys)(const int64_t *seeds, const int64_t *first, int64_t *keys, int64_t requests, int64_t stride,
                       int64_t count)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    for (int64_t r = 0; r < requests; r++) {
        uint64_t seed = mixed((uint64_t)seeds[r * stride] + golden), at = (uint64_t)first[r];
        for (int64_t i = 0; i < count; i++) keys[r * count + i] = (int64_t)mixed(seed + (at + (uint64_t)i) * golden);
    }
}
