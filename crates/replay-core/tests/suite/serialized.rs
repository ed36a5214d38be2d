//! The names under which settings and batches are stored, which must not change.

use replay_core::{GraphMode, RankNeed, ReplayPolicy, Request, RowCount, Window};
use serde::{Serialize, de::DeserializeOwned};

fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, json: &str) {
    assert_eq!(serde_json::to_string(value).expect("serializable"), json);
    assert_eq!(
        &serde_json::from_str::<T>(json).expect("deserializable"),
        value
    );
}

#[test]
fn settings_and_batches_have_stable_names() {
    for policy in ReplayPolicy::ALL {
        check(&policy, &format!("{:?}", policy.name()));
    }
    check(&Window::new(128).expect("a window"), "128");
    check(
        &GraphMode::Piecewise {
            padded_rows: RowCount::new(64),
        },
        r#"{"Piecewise":{"padded_rows":64}}"#,
    );
    check(
        &Request::prefill(20, 16..20),
        r#"{"query_len":4,"seq_len":20,"prompt_len":20,"replay_start":0,"prefilling":true,"keeps_rows":false}"#,
    );
    check(
        &RankNeed {
            replays: true,
            n_rows: RowCount::new(8),
            uniform: true,
        },
        r#"{"replays":true,"n_rows":8,"uniform":true}"#,
    );
}

#[test]
fn a_stored_window_is_checked() {
    let error = serde_json::from_str::<Window>("0").expect_err("zero is no window");
    assert!(error.to_string().contains("1 to 16777216 tokens, got 0"));
}
