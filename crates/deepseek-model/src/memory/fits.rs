//! How much would fit of what is too much.

/// The largest number below `too_many` that `fits`, of what takes no less where there is more of it; 0 if
/// none does.
///
/// ```
/// # use deepseek_model::memory::largest_below;
/// assert_eq!(largest_below(100, |rows| rows * 30 <= 1000), 33);
/// ```
pub fn largest_below(too_many: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut most, mut too_many) = (0, too_many);
    while most + 1 < too_many {
        let number = most.midpoint(too_many);
        if fits(number) {
            most = number;
        } else {
            too_many = number;
        }
    }
    most
}

/// The same of rows, as a refusal says it.
pub(crate) fn rows_would_fit(rows: usize) -> String {
    match rows {
        0 => "none would fit".to_owned(),
        1 => "1 row would fit".to_owned(),
        rows => format!("{rows} rows would fit"),
    }
}

/// A number of tokens of a cache, as a refusal says it.
pub(crate) fn tokens(tokens: usize) -> String {
    match tokens {
        0 => "none".to_owned(),
        1 => "1 token".to_owned(),
        tokens => format!("{tokens} tokens"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_that_fits_is_found_and_nothing_else_is_asked() {
        for too_many in [0, 1, 2, 3, 100] {
            for most in 0..too_many {
                let fits = |number| {
                    assert!((1..too_many).contains(&number), "{number}");
                    number <= most
                };
                assert_eq!(largest_below(too_many, fits), most, "below {too_many}");
            }
        }
        assert_eq!(largest_below(usize::MAX, |_| true), usize::MAX - 1);
    }
}
