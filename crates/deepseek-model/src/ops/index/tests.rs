//! What no checkpoint makes the indexer see.

use super::*;
use crate::ops::Site;

/// Chosen by a NaN, entries would be any: an order by bits puts it first or last, a maximum
/// passes it over.
#[test]
fn scores_that_are_not_numbers_are_refused_at_every_level() {
    let (rows, dim) = (Rows::pack(&Device::Cpu, [(0, 0, 8)]), 2);
    let tensor = |values: Vec<f32>, width| Tensor::from_vec(values, (8, width), &Device::Cpu);
    let config = CandidateConfig {
        source: 0,
        top_blocks: 2,
        block_size: 2,
    };
    let blocks = Choice::new((0..8).flat_map(|_| [0, 1]).collect(), 8, 2).unwrap();
    let levels = [
        Level::Single,
        Level::Source(config),
        Level::Within(&blocks, 2),
    ];
    let choose = |level, query: f32, key: f32| {
        let place = (candle_core::DType::F32, &Device::Cpu);
        let pool = PagedRows::new(1, 8, dim, place).unwrap();
        pool.fill(key).unwrap();
        let queries = IndexQueries {
            queries: &tensor(vec![query; 16], dim).unwrap(),
            head_weights: &tensor(vec![1.0; 8], 1).unwrap(),
            rows: &rows,
            topk: 1,
            faults: Faults::new(None, 0, Site::Index),
        };
        let keys = IndexKeys {
            pool: &pool,
            pages: &PageLists::new([&[0][..]]),
            ratio: 1,
        };
        choose_entries(&queries, &keys, level, false).map(|chosen| chosen.choice.width)
    };
    for level in levels {
        assert_eq!(choose(level, 1.0, 1.0).unwrap(), 1);
        for (query, key) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, 0.0)] {
            let error = choose(level, query, key).unwrap_err().to_string();
            let expected = "the index scores of a row are not numbers";
            assert!(error.starts_with(expected), "{query}, {key}: {error}");
        }
    }
}
