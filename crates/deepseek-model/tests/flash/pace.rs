//! Predictions and the budget.

use std::time::Duration;

use crate::flash::{
    cost::Work,
    pace::{Kind, Pace, Runs},
    rates::Rates,
    spread::Spread,
};

fn pace(seconds: u64) -> Pace {
    let mut pace = Pace::new(Duration::from_secs(seconds));
    pace.rates(&Rates {
        copy: Spread::of([1e9]),
        matmul: Spread::of([1e12]),
    });
    pace
}

#[test]
fn predictions_follow_what_was_measured() {
    let mut pace = pace(100);
    let work = |flops, bytes| Work { flops, bytes };
    let kind = Kind::Decode { graphs: true };
    assert_eq!(pace.predict(kind, work(0.0, 1e9)), 10.0);
    pace.learn(kind, work(1e12, 2e9), 5.0);
    assert_eq!(pace.predict(kind, work(0.0, 4e9)), 10.0);
    assert_eq!(pace.predict(Kind::Prefill, work(1e12, 0.0)), 10.0);
}

#[test]
fn what_does_not_fit_is_measured_less_often_or_not_at_all() {
    let runs = |warm, measured| Some(Runs { warm, measured });
    assert_eq!(pace(100).runs(0.5, 1.0), runs(1, 5));
    assert_eq!(pace(100).runs(4.0, 1.0), runs(1, 3));
    assert_eq!(pace(100).runs(20.0, 1.0), runs(0, 1));
    assert_eq!(pace(10).runs(4.0, 1.0), runs(0, 1));
    assert_eq!(pace(10).runs(8.0, 1.0), None);
    assert_eq!(pace(0).runs(0.0001, 0.0), None);
}
