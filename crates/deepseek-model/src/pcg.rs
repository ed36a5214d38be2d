//! The random generator of `numpy.random.default_rng`: a seed sequence and PCG64.
//!
//! The engram's multipliers were drawn with it, so it has to give numpy's very numbers. The sampler
//! uses it too: its stream is fixed for good, where a general-purpose crate keeps the right to
//! change its own between releases.

/// Words of entropy that a seed is stirred into.
const POOL: usize = 4;

/// Spreads a seed over as many well mixed words as a generator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeedSequence {
    pool: [u32; POOL],
}

impl SeedSequence {
    /// `numpy.random.SeedSequence(seed)`.
    pub(crate) fn new(seed: u64) -> Self {
        Self::from_words(&words(seed))
    }

    /// `numpy.random.SeedSequence(seed, spawn_key=(stream,))`: the seed of the `stream`-th of any
    /// number of independent generators.
    pub(crate) fn stream(seed: u64, stream: u64) -> Self {
        // The seed is filled up to the pool's size first, so that no seed runs into a stream.
        let mut entropy = words(seed);
        entropy.resize(POOL, 0);
        entropy.extend(words(stream));
        Self::from_words(&entropy)
    }

    fn from_words(entropy: &[u32]) -> Self {
        let mut hash = Hash {
            constant: 0x43b0_d7e5,
            factor: 0x931e_8875,
        };
        let mut pool: [u32; POOL] =
            std::array::from_fn(|i| hash.next(entropy.get(i).copied().unwrap_or(0)));
        for source in 0..POOL {
            for target in (0..POOL).filter(|target| *target != source) {
                pool[target] = mix(pool[target], hash.next(pool[source]));
            }
        }
        for &word in entropy.iter().skip(POOL) {
            for target in &mut pool {
                *target = mix(*target, hash.next(word));
            }
        }
        Self { pool }
    }

    /// The first four 64-bit words.
    fn generate(&self) -> [u64; 4] {
        let mut hash = Hash {
            constant: 0x8b51_f9dd,
            factor: 0x58f3_8ded,
        };
        let words: [u32; 8] = std::array::from_fn(|i| hash.next(self.pool[i % POOL]));
        std::array::from_fn(|k| u64::from(words[2 * k]) | u64::from(words[2 * k + 1]) << 32)
    }
}

/// Little-endian 32-bit words of `value`, at least one.
fn words(value: u64) -> Vec<u32> {
    let (low, high) = (value as u32, (value >> 32) as u32);
    if high == 0 {
        vec![low]
    } else {
        vec![low, high]
    }
}

/// A multiplicative hash whose constant moves on with every word.
struct Hash {
    constant: u32,
    factor: u32,
}

impl Hash {
    fn next(&mut self, word: u32) -> u32 {
        let word = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.factor);
        let word = word.wrapping_mul(self.constant);
        word ^ (word >> 16)
    }
}

fn mix(x: u32, y: u32) -> u32 {
    let z = x
        .wrapping_mul(0xca01_f9dd)
        .wrapping_sub(y.wrapping_mul(0x4973_f715));
    z ^ (z >> 16)
}

/// PCG XSL-RR 128/64, as numpy seeds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    /// `numpy.random.PCG64(seed)`.
    pub(crate) fn new(seed: &SeedSequence) -> Self {
        let [s0, s1, i0, i1] = seed.generate().map(u128::from);
        let mut pcg = Self {
            state: 0,
            increment: (i0 << 64 | i1) << 1 | 1,
        };
        pcg.step();
        pcg.state = pcg.state.wrapping_add(s0 << 64 | s1);
        pcg.step();
        pcg
    }

    fn step(&mut self) {
        const FACTOR: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self.state.wrapping_mul(FACTOR).wrapping_add(self.increment);
    }

    /// The next 64 bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// A number in `[0, 1)` with 53 random bits: `Generator.random()`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// An unbiased number below `bound`, by Lemire's multiplication: `Generator.integers(0, bound)`.
    ///
    /// Equal to numpy's for `bound` above 2^32 (numpy draws 32 bits at a time below that) and for 1
    /// (which takes no draw).
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        if bound == 1 {
            return 0;
        }
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            // The lowest `2^64 mod bound` remainders come up once too often.
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

/// Every expected number was printed by numpy 2.4.6.
#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_stream(seed: u64, stream: u64, raw: [u64; 2], unit: [f64; 2]) {
        let sequence = SeedSequence::stream(seed, stream);
        let mut pcg = Pcg64::new(&sequence);
        assert_eq!([pcg.next_u64(), pcg.next_u64()], raw);
        let mut pcg = Pcg64::new(&sequence);
        assert_eq!(
            [pcg.unit(), pcg.unit()].map(f64::to_bits),
            unit.map(f64::to_bits)
        );
    }

    /// `PCG64(10007).random_raw(2)`: engram layer 1.
    #[test]
    fn first_words_of_the_first_released_engram_layer() {
        let mut pcg = Pcg64::new(&SeedSequence::new(10_007));
        assert_eq!(pcg.next_u64(), 0xd2c3_f840_2666_1e33);
        assert_eq!(pcg.next_u64(), 0x0d4f_b696_9eb5_7435);
    }

    /// `PCG64(SeedSequence(seed, spawn_key=(stream,)))`: `random_raw(2)`, then `random(2)` afresh.
    /// Seeds and streams of one and of two words.
    #[test]
    fn streams_of_a_seed() {
        check_stream(
            0,
            0,
            [0xf164_5aff_cd5f_76ee, 0x50fb_78bc_0167_5596],
            [0.942_937_552_882_879_4, 0.316_337_152_385_498_1],
        );
        check_stream(
            0,
            1,
            [0xad5c_c5f1_a97c_42b5, 0x3e34_612a_5a50_a3c0],
            [0.677_196_856_975_101_9, 0.242_986_748_542_821_2],
        );
        check_stream(
            7,
            3,
            [0xfb79_81c9_7ac2_f34c, 0x0f9a_81e7_5305_23ae],
            [0.982_322_799_386_348_8, 0.060_951_346_374_185_98],
        );
        check_stream(
            (1 << 63) + 11,
            5,
            [0x3c2c_66ab_f3bc_efed, 0x46f0_3ef8_f481_1c4f],
            [0.235_052_506_428_235_5, 0.277_103_362_827_351_04],
        );
        check_stream(
            1 << 40,
            1 << 33,
            [0xe07d_0f8c_5968_06e7, 0x660b_8a14_7330_ce9b],
            [0.876_908_275_380_088_8, 0.398_613_576_882_044_6],
        );
    }

    /// `default_rng(10007).integers(0, 2**62 + 3, size=6)`: a quarter of the words is drawn again.
    #[test]
    fn a_bound_that_redraws_often() {
        let mut pcg = Pcg64::new(&SeedSequence::new(10_007));
        let drawn: Vec<u64> = (0..6).map(|_| pcg.below((1 << 62) + 3)).collect();
        assert_eq!(
            drawn,
            [
                239_796_500_919_311_629,
                1_781_657_924_734_481_867,
                1_979_716_633_701_278_751,
                3_488_206_865_698_518_460,
                1_025_842_855_755_418_169,
                103_954_991_085_286_065,
            ]
        );
    }

    #[test]
    fn a_bound_of_one_leaves_the_generator_alone() {
        let mut pcg = Pcg64::new(&SeedSequence::new(1));
        let before = pcg.clone();
        assert_eq!(pcg.below(1), 0);
        assert_eq!(pcg, before);
    }
}
