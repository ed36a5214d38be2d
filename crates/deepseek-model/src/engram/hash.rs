//! Token ids to table rows.

use super::primes::PrimePool;
use super::{EngramError, TokenMap};
use crate::config::EngramConfig;
use crate::pcg::{Pcg64, SeedSequence};

/// Step between the seeds of two layers' multipliers.
const LAYER_SEED: u64 = 10_007;

/// Hashes of one layer.
#[derive(Debug, Clone)]
struct LayerHash {
    /// One odd factor per place back, the token itself first.
    multipliers: Vec<u64>,
    /// One modulus per column.
    primes: Vec<u64>,
    /// First table row of each column's range.
    offsets: Vec<u64>,
}

/// Table rows of the n-grams that end at each token.
///
/// A column belongs to one n-gram size and one head; columns are ordered by size, then head. The
/// n-gram's hash is the xor of its tokens' compressed ids, each multiplied by the factor of its
/// place; the column's prime brings it into the column's range of the table.
#[derive(Debug, Clone)]
pub struct NgramHasher {
    map: TokenMap,
    max_ngram: usize,
    heads: usize,
    layers: Vec<LayerHash>,
}

impl NgramHasher {
    /// Draws the primes and multipliers of every engram layer.
    ///
    /// # Errors
    /// Refuses a table with fewer rows than the primes of its columns add up to, and n-grams of fewer
    /// than 2 tokens or no heads.
    pub fn new(config: &EngramConfig, map: &TokenMap) -> Result<Self, EngramError> {
        let (max_ngram, heads) = (config.max_ngram, config.heads);
        if max_ngram < 2 || heads == 0 {
            return Err(EngramError::NoColumns { max_ngram, heads });
        }
        let mut pool = PrimePool::default();
        let layers = config
            .layers
            .iter()
            .zip(&config.table_rows)
            .map(|(&layer, &rows)| {
                let primes = column_primes(config, layer, rows, &mut pool)?;
                let offsets = primes
                    .iter()
                    .scan(0, |next, prime| {
                        Some(std::mem::replace(next, *next + prime))
                    })
                    .collect();
                let multipliers = multipliers(layer, config.max_ngram, map.count());
                Ok(LayerHash {
                    multipliers,
                    primes,
                    offsets,
                })
            })
            .collect::<Result<_, EngramError>>()?;
        Ok(Self {
            map: map.clone(),
            max_ngram,
            heads,
            layers,
        })
    }

    /// Table rows per token.
    pub fn columns(&self) -> usize {
        (self.max_ngram - 1) * self.heads
    }

    /// Ids before a run that its first tokens' n-grams reach into: the longest n-gram less one.
    pub fn lookback(&self) -> usize {
        self.max_ngram - 1
    }

    /// Appends to `out`, as `[ids, columns]` row-major, the rows of the table of engram layer number
    /// `layer_slot` (its place in [`EngramConfig::layers`]). A packed batch is one call per sequence.
    ///
    /// `back` holds the ids just before `ids`, oldest first; only the last [`Self::lookback`] of
    /// them matter. Where it is shorter than that, the text begins, and the places before it count
    /// as the pad token.
    ///
    /// # Errors
    /// An id that the tokenizer does not know, or no such layer.
    pub fn table_rows(
        &self,
        layer_slot: usize,
        ids: &[u32],
        back: &[u32],
        out: &mut Vec<i64>,
    ) -> Result<(), EngramError> {
        let layer = self.layers.get(layer_slot).ok_or(EngramError::NoTable {
            table: layer_slot,
            tables: self.layers.len(),
        })?;
        let compressed = self.compress(ids, back)?;
        out.reserve(ids.len() * self.columns());
        for gram in compressed.windows(self.max_ngram) {
            layer.push_rows(gram, self.heads, out);
        }
        Ok(())
    }

    /// Compressed ids of `ids` behind exactly `lookback` ids.
    fn compress(&self, ids: &[u32], back: &[u32]) -> Result<Vec<u64>, EngramError> {
        let back = &back[back.len().saturating_sub(self.lookback())..];
        let pads = self.lookback() - back.len();
        let mut compressed = vec![u64::from(self.map.pad()); pads];
        compressed.reserve(back.len() + ids.len());
        for (index, &id) in back.iter().chain(ids).enumerate() {
            compressed.push(u64::from(self.map.get(id, index)?));
        }
        Ok(compressed)
    }
}

impl LayerHash {
    /// Appends the columns of the token that ends `gram`, the compressed ids oldest first.
    fn push_rows(&self, gram: &[u64], heads: usize, out: &mut Vec<i64>) {
        let mut mixed = 0;
        let columns = self.primes.chunks(heads).zip(self.offsets.chunks(heads));
        // No overflow: a multiplier is at most (2^63 - 1) / count, a compressed id below count.
        let mut terms = gram
            .iter()
            .rev()
            .zip(&self.multipliers)
            .map(|(id, factor)| id * factor);
        mixed ^= terms.next().unwrap_or(0);
        for (term, (primes, offsets)) in terms.zip(columns) {
            mixed ^= term;
            let rows = primes
                .iter()
                .zip(offsets)
                .map(|(prime, offset)| mixed % prime + offset);
            out.extend(rows.map(|row| row as i64));
        }
    }
}

/// One prime per column; every n-gram size starts its search at the configured size again.
fn column_primes(
    config: &EngramConfig,
    layer: usize,
    rows: usize,
    pool: &mut PrimePool,
) -> Result<Vec<u64>, EngramError> {
    // Primes are not smaller than where the search starts. Checked first, so that an absurd size
    // is refused rather than factored.
    let least = (config.vocab_size as u64).saturating_mul(config.columns() as u64);
    if least > rows as u64 {
        return Err(EngramError::TableTooShort {
            layer,
            rows,
            needed: least,
        });
    }
    let start = config.vocab_size as u64;
    let columns = config.columns();
    let (mut primes, mut sum) = (Vec::with_capacity(columns), 0);
    for left in (0..columns as u64).rev() {
        let prime = pool.take(start);
        primes.push(prime);
        sum += prime;
        // What is left needs `start` rows a column at least: no need to search for its primes.
        let needed = sum.saturating_add(start.saturating_mul(left));
        if needed > rows as u64 {
            return Err(EngramError::TableTooShort {
                layer,
                rows,
                needed,
            });
        }
    }
    Ok(primes)
}

/// `count` odd factors such that a factor times a compressed id stays below 2^63.
fn multipliers(layer: usize, count: usize, compressed_vocab: usize) -> Vec<u64> {
    let bound = (i64::MAX as u64 / compressed_vocab.max(1) as u64 / 2).max(1);
    let mut random = Pcg64::new(&SeedSequence::new((layer as u64).wrapping_mul(LAYER_SEED)));
    (0..count).map(|_| 2 * random.below(bound) + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layer, number of compressed ids, multipliers, as numpy 2.4.6 draws them:
    /// `2 * default_rng(10007 * layer).integers(0, max(1, (2**63 - 1) // ids // 2), size=4) + 1`.
    /// The released model is (1, 99092) and (14, 99092); 429497 is the first layer whose seed takes
    /// two words.
    #[rustfmt::skip]
    const FROM_NUMPY: [(usize, usize, [u64; 4]); 16] = [
        (0, 2, [2_937_467_307_694_268_567, 1_244_171_615_822_312_903, 188_957_027_462_249_005, 76_220_265_684_581_383]),
        (1, 2, [3_796_813_830_707_316_619, 239_796_500_919_311_629, 1_781_657_924_734_481_865, 3_665_776_621_713_512_655]),
        (14, 2, [3_355_097_104_887_443_523, 2_552_154_433_758_184_157, 1_532_029_068_506_037_381, 4_093_452_195_455_176_997]),
        (1, 238, [31_905_998_577_372_407, 2_015_096_646_380_769, 14_971_915_333_903_209, 30_804_845_560_617_753]),
        (3, 238, [11_460_937_439_619_159, 33_999_065_262_398_813, 4_529_058_645_509_077, 29_268_339_312_563_419]),
        (429_497, 238, [36_565_903_755_240_485, 13_175_338_605_346_073, 14_301_262_046_976_847, 12_898_495_349_657_161]),
        (0, 1620, [3_626_502_849_005_269, 1_536_014_340_521_373, 233_280_280_817_591, 94_099_093_437_755]),
        (1, 1620, [4_687_424_482_354_711, 296_045_062_863_347, 2_199_577_684_857_385, 4_525_650_150_263_595]),
        (1, 99_092, [76_632_096_046_245, 4_839_876_093_313, 35_959_672_319_349, 73_987_337_458_391]),
        (3, 99_092, [27_526_976_048_817, 81_659_241_234_921, 10_877_931_191_531, 70_296_943_813_729]),
        (14, 99_092, [67_716_810_739_261, 51_510_806_800_915, 30_921_347_202_721, 82_619_226_485_591]),
        (429_497, 99_092, [87_824_295_540_983, 31_644_639_204_701, 34_348_891_607_601, 30_979_714_742_041]),
        (1_099_511_627_781, 99_092, [8_828_835_823_825, 40_692_719_132_725, 8_428_470_331_665, 63_724_363_804_105]),
        (0, 129_280, [45_443_491_765_071, 19_247_704_452_697, 2_923_221_340_691, 1_179_150_149_823]),
        (1, 129_280, [58_737_837_727_525, 3_709_723_095_905, 27_562_777_300_965, 56_710_653_182_447]),
        (14, 129_280, [51_904_348_776_103, 39_482_587_155_911, 23_700_944_747_927, 63_326_921_340_579]),
    ];

    #[test]
    fn multipliers_are_those_of_numpy() {
        for (layer, ids, expected) in FROM_NUMPY {
            assert_eq!(
                multipliers(layer, 4, ids),
                expected,
                "layer {layer}, {ids} ids"
            );
        }
    }

    fn released() -> EngramConfig {
        EngramConfig {
            layers: vec![1, 14],
            table_rows: vec![384_006_168, 384_016_682],
            max_ngram: 4,
            heads: 8,
            head_dim: 256,
            vocab_size: 16_000_000,
            pad_token_id: 2,
            compressed_vocab_size: 99_092,
        }
    }

    #[test]
    fn released_primes() {
        let config = released();
        let mut pool = PrimePool::default();
        let first = column_primes(&config, 1, config.table_rows[0], &mut pool).unwrap();
        assert_eq!(first[..2], [16_000_057, 16_000_079]);
        assert_eq!((first.len(), first[23]), (24, 16_000_463));
        assert_eq!(first.iter().sum::<u64>(), 384_006_168);

        let second = column_primes(&config, 14, config.table_rows[1], &mut pool).unwrap();
        assert_eq!((second[0], second[23]), (16_000_477, 16_000_889));
        assert_eq!(second.iter().sum::<u64>(), 384_016_682);
    }

    #[test]
    fn a_table_one_row_short_is_refused() {
        let config = released();
        let error = column_primes(&config, 1, 384_006_167, &mut PrimePool::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the engram table of layer 1 has 384006167 rows, but its hash columns need at least \
             384006168 (engram_num_embeddings, engram_vocab_size, \
             engram_n_heads, engram_max_ngram_size)"
        );
    }

    #[test]
    fn the_search_ends_where_the_table_does() {
        let config = EngramConfig {
            max_ngram: 64,
            heads: 65,
            vocab_size: 1,
            ..released()
        };
        let error = column_primes(&config, 1, 10_000, &mut PrimePool::default()).unwrap_err();
        // 2 + 3 + .. + 307, and one row for each of the columns not searched for.
        assert!(
            matches!(error, EngramError::TableTooShort { needed, .. } if needed < 11_000),
            "{error}"
        );
    }

    #[test]
    fn an_absurd_size_is_refused_at_once() {
        let config = EngramConfig {
            vocab_size: usize::MAX,
            ..released()
        };
        let error = column_primes(&config, 1, 1000, &mut PrimePool::default()).unwrap_err();
        assert!(matches!(error, EngramError::TableTooShort { needed, .. } if needed == u64::MAX));
    }
}
