//! The geometry, and the order of the measurements.

use std::{collections::HashSet, path::Path};

use deepseek_model::Config;

use crate::flash::{
    geometry::{Geometry, MOST_STEPS, short},
    spread::Spread,
    tasks::{Task, in_order},
};

/// All that decides how long a step takes is the released model's, but for what the name says.
#[test]
fn flash_slice_is_the_release_with_16_experts_and_no_engram() {
    let release = include_str!("../config/release.json");
    let mut expected = Config::from_json(release, Path::new("release.json")).unwrap();
    let geometry = Geometry::new(false);
    let config = geometry.config().unwrap();
    assert_eq!(config.max_positions, 131_072 + MOST_STEPS);
    expected.num_experts = 16;
    expected.engram = None;
    expected.expert_dtype = None;
    expected.max_positions = config.max_positions;
    for layer in &mut expected.layers {
        layer.engram = None;
    }
    assert_eq!(config, expected);
}

#[test]
fn lengths_are_short() {
    assert_eq!([64, 1024, 131_072].map(short), ["64", "1K", "128K"]);
}

#[test]
fn every_task_comes_once_and_the_longest_last() {
    let geometry = Geometry::new(false);
    let tasks = in_order(&geometry);
    assert_eq!(tasks.len(), 5 * 4 * 2 + 3 * 3 * 2 + 2);
    let names: HashSet<String> = tasks.iter().map(Task::to_string).collect();
    assert_eq!(names.len(), tasks.len());
    assert_eq!(tasks[0].to_string(), "prompt of 8K, off, graphs off");
    assert_eq!(tasks[4].to_string(), "decode of 1 after 1K, graphs on");
    let last = tasks[tasks.len() - 1].to_string();
    assert_eq!(last, "prompt of 128K, exact, graphs on");
}

#[test]
fn lengths_may_all_be_long_or_short() {
    let of = |lengths: &[usize]| {
        let mut geometry = Geometry::new(false);
        geometry.lengths = lengths.to_vec();
        in_order(&geometry).len()
    };
    assert_eq!(of(&[100_000]), 8 + 18 + 2);
    assert_eq!(of(&[10, 10]), 8 + 18 + 2);
}

#[test]
fn the_median_lies_between() {
    let spread = Spread::of([3.0, 1.0, 2.0, 10.0, 2.5]);
    assert_eq!((spread.least, spread.median, spread.most), (1.0, 2.5, 10.0));
    let inverse = spread.map(|x| 10.0 / x);
    assert_eq!(
        (inverse.least, inverse.median, inverse.most),
        (1.0, 4.0, 10.0)
    );
    assert_eq!(Spread::of([]).runs, 0);
}

/// PyTorch is measured on layers of the same sizes.
#[test]
fn the_peer_has_the_geometry_of_flash_slice() {
    let script = include_str!("../../benches/peer_torch.py");
    let (_, rest) = script.split_once("GEOMETRY = ").unwrap();
    let (object, _) = rest.split_once("\n}").unwrap();
    let peer: serde_json::Value = serde_json::from_str(&format!("{object}}}")).unwrap();
    let slice = include_str!("../../benches/flash/flash-slice.json");
    let slice: serde_json::Value = serde_json::from_str(slice).unwrap();
    for (key, value) in peer.as_object().unwrap() {
        assert_eq!(slice[key], *value, "{key}");
    }
    for key in ["kv_source_layer_ids", "index_source_layer_ids"] {
        let list = slice[key].to_string().replace(',', ", ");
        assert!(script.contains(&format!("SOURCES = {list}")), "{list}");
    }
}
