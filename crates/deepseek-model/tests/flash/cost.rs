//! The formulas, on numbers small enough to count by hand, and on the released geometry.

use deepseek_model::{Config, LayerStats, ReplayPolicy, StepMode, StepStats};

use crate::flash::{
    cost::{Cost, ENCODER, HEAD, Reads, Step, WRITE_KV, Work},
    geometry::Geometry,
    plan,
};

fn tiny() -> Config {
    Geometry::new(true).config().unwrap()
}

/// One request of `rows` rows, all of which run in all layers.
fn whole(config: &Config, rows: usize) -> StepStats {
    let layer = LayerStats {
        written: vec![rows],
        run: vec![rows],
    };
    StepStats {
        query_rows: vec![rows],
        layers: vec![layer; config.layers.len()],
    }
}

fn step<'a>(stats: &'a StepStats, start: &'a [usize]) -> Step<'a> {
    Step {
        starts: start,
        stats,
        read: 1,
        mode: StepMode::Eager,
    }
}

#[test]
fn rows_read_their_window_and_what_they_chose() {
    let config = tiny();
    let stats = whole(&config, 4);
    let reads = |layer, start| Reads::of(&step(&stats, start), layer, &config);
    // Window 8, no entries: 1 + 2 + 3 + 4 keys.
    let first = reads(0, &[0]);
    assert_eq!((first.keys, first.distinct_keys), (10.0, 4.0));
    // Positions 20..24: 8 keys each, of positions 13..24.
    let later = reads(0, &[20]);
    assert_eq!((later.keys, later.distinct_keys), (32.0, 11.0));
    // Ratio 2: of 10, 11, 11 and 12 visible entries at most 12 are chosen.
    let sparse = reads(2, &[20]);
    assert_eq!(sparse.keys, 32.0 + 44.0);
    assert_eq!(sparse.distinct_keys, 11.0 + 12.0);
    assert_eq!((sparse.scores, sparse.distinct_scored), (44.0, 12.0));
    // Ratio 1, within 6 blocks of 4: of 101..105 entries 24 are scored.
    let within = reads(7, &[100]);
    assert_eq!(within.scores, 4.0 * 24.0);
    assert_eq!(within.keys, 4.0 * (8.0 + 12.0));
}

#[test]
fn kept_rows_see_no_window_kv_of_dropped_ones() {
    let config = tiny();
    let mut stats = whole(&config, 20);
    stats.layers[6] = LayerStats {
        written: vec![3],
        run: vec![3],
    };
    let reads = Reads::of(&step(&stats, &[40]), 6, &config);
    assert_eq!(reads.keys, (1 + 2 + 3) as f64 + 3.0 * 12.0);
}

#[test]
fn a_window_layer_of_the_tiny_model() {
    let config = tiny();
    let cost = Cost::new(&config, 4);
    let stats = whole(&config, 2);
    let reads = Reads::of(&step(&stats, &[0]), 0, &config);
    let run = cost.run(0, 2.0, &reads);
    let products = [
        2 * 24 * 256,    // both mixes
        32 * 64,         // wq_a
        256 * 32,        // wq_b
        32 * 256,        // wo_a
        64 * 64,         // wo_b
        8 * 64,          // router
        3 * 32 * 64,     // shared expert
        2 * 3 * 32 * 64, // two of the others
    ];
    let products: usize = products.iter().sum();
    let attention = 4 * 3 * 256;
    assert_eq!(run.flops, (2 * 2 * products + attention) as f64);
    let enter = cost.enter(0, 2.0);
    assert_eq!(enter.flops, (2 * 2 * 64 * 64) as f64);
    assert_eq!(enter.bytes, (4 * 64 * 64 + 2 * 4 * (4 * 64 + 64)) as f64);
}

/// A decode step of one row reads what it multiplies: two operations for each element.
#[test]
fn a_decode_step_of_the_released_geometry() {
    let geometry = Geometry::new(false);
    let config = geometry.config().unwrap();
    let cost = Cost::new(&config, 2);
    let stats = whole(&config, 1);
    let work: Work = cost.step(&step(&stats, &[1024])).into_iter().sum();
    // 32 GB of bf16 and f32 weights for one row, of 62 GB.
    assert!((30e9..36e9).contains(&work.bytes), "{work:?}");
    assert!((30e9..36e9).contains(&work.flops), "{work:?}");
    let many = whole(&config, 512);
    let many: Work = cost.step(&step(&many, &[0])).into_iter().sum();
    assert!((60e9..66e9).contains(&many.bytes), "{many:?}");
}

/// The cut is layer 20 of 40, so little more than half of a long prompt is left.
#[test]
fn policies_save_what_they_drop() {
    let config = Geometry::new(false).config().unwrap();
    let cost = Cost::new(&config, 2);
    let flops = |policy| {
        let phases = plan::work(&cost, &config, policy, (8192, 8192)).unwrap();
        phases.map(|work| work.flops)
    };
    let sum = |phases: [f64; 6]| phases.iter().sum::<f64>();
    let off = flops(ReplayPolicy::Off);
    let tail = flops(ReplayPolicy::PromptTail);
    let exact = flops(ReplayPolicy::Exact);
    assert_eq!(off[ENCODER], tail[ENCODER]);
    assert_eq!(off[WRITE_KV], tail[WRITE_KV]);
    assert!((0.45..0.6).contains(&(sum(tail) / sum(off))));
    assert!(sum(tail) < sum(exact) && sum(exact) < sum(off));
    assert_eq!(flops(ReplayPolicy::StepTail), tail);
}

#[test]
fn pad_rows_are_multiplied() {
    let config = tiny();
    let cost = Cost::new(&config, 4);
    let stats = whole(&config, 3);
    let mut padded = step(&stats, &[0]);
    padded.mode = StepMode::Full { padded_rows: 4 };
    let (three, four) = (cost.step(&step(&stats, &[0])), cost.step(&padded));
    assert!(four[ENCODER].flops > three[ENCODER].flops);
    assert_eq!(four[HEAD].flops, 4.0 * three[HEAD].flops);
}
