//! Values of JSON as somebody wrote them, and what is said of one that will not do: what was expected,
//! and what came.

use std::ops::RangeInclusive;

use anyhow::anyhow;
use serde_json::{Map, Value};

use crate::io;

/// 2^64: `serde_json` makes a float of a whole number from here on.
const BEYOND: f64 = 18_446_744_073_709_551_616.0;

/// A whole number within `range`.
///
/// # Errors
/// It is none; says what was expected, by the end of the range that it is beyond, and what came.
pub(crate) fn whole(range: RangeInclusive<u64>, value: &Value) -> Result<u64, String> {
    let (least, most) = (*range.start(), *range.end());
    match value.as_u64() {
        Some(number) if range.contains(&number) => Ok(number),
        // Both ends say something to who reads them.
        _ if most < u32::MAX.into() => {
            let got = quoted(value);
            Err(format!(
                "expected a whole number from {least} to {most}, got {got}"
            ))
        }
        _ => Err(not_above(most, value).unwrap_or_else(|| {
            let got = quoted(value);
            format!("expected a whole number, {least} or above, got {got}")
        })),
    }
}

/// The same as a `usize`.
///
/// # Errors
/// As [`whole`].
pub(crate) fn whole_from(least: usize, value: &Value) -> Result<usize, String> {
    let number = whole(least as u64..=usize::MAX as u64, value)?;
    Ok(usize::try_from(number).expect("it is within the range"))
}

/// What is said of a number above `most`; nothing of other values.
pub(crate) fn not_above(most: u64, value: &Value) -> Option<String> {
    let above = match value.as_u64() {
        Some(number) => number > most,
        None => value.as_f64()? >= BEYOND.min((most as f64).next_up()),
    };
    above.then(|| format!("expected at most {most}, got {}", quoted(value)))
}

/// Token ids.
///
/// # Errors
/// One is none; gives its index, and says what was expected and what came.
pub(crate) fn ids(list: &[Value]) -> Result<Vec<u32>, (usize, String)> {
    let id = |(index, value)| {
        let number = whole(0..=u32::MAX.into(), value).map_err(|fault| (index, fault))?;
        Ok(u32::try_from(number).expect("it is within the range"))
    };
    list.iter().enumerate().map(id).collect()
}

/// A field; none if it is absent or null.
pub(crate) fn field<T>(
    fields: &Map<String, Value>,
    name: &str,
    expected: &str,
    parse: impl FnOnce(&Value) -> Option<T>,
) -> anyhow::Result<Option<T>> {
    let refused = |value: &Value| format!("expected {expected}, got {}", quoted(value));
    field_or(fields, name, |value| {
        parse(value).ok_or_else(|| refused(value))
    })
}

/// The same where `parse` says itself what it expected and what came.
pub(crate) fn field_or<T>(
    fields: &Map<String, Value>,
    name: &str,
    parse: impl FnOnce(&Value) -> Result<T, String>,
) -> anyhow::Result<Option<T>> {
    let value = fields.get(name).filter(|value| !value.is_null());
    let parsed = value.map(parse).transpose();
    parsed.map_err(|fault| anyhow!("{name}: {fault}"))
}

/// A whole number, `least` or above.
pub(crate) fn count(
    fields: &Map<String, Value>,
    name: &str,
    least: usize,
) -> anyhow::Result<Option<usize>> {
    field_or(fields, name, |value| whole_from(least, value))
}

/// A value, or its beginning.
pub(crate) fn quoted(value: &Value) -> String {
    // JSON escapes only some of the control characters.
    io::beginning(&value.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Of a number that is too large, its lower limit would say what it fulfils.
    #[test]
    fn a_refusal_names_the_limit_that_a_number_is_beyond() {
        let of = |text: &str, range: RangeInclusive<u64>| {
            whole(range, &serde_json::from_str(text).unwrap())
        };
        assert_eq!(of("18446744073709551615", 0..=u64::MAX), Ok(u64::MAX));
        assert_eq!(of("1", 1..=128), Ok(1));
        let refusals = [
            of("18446744073709551616", 0..=u64::MAX),
            of("1e30", 0..=u64::MAX),
            of("129", 1..=128),
            of("1e9", 1..=128),
            of("128.0", 1..=128),
            of("0", 1..=128),
            of("-1", 1..=128),
            of("-1e30", 1..=128),
            of("\"5\"", 0..=u64::MAX),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        expected at most 18446744073709551615, got 1.8446744073709552e+19
        expected at most 18446744073709551615, got 1e+30
        expected a whole number from 1 to 128, got 129
        expected a whole number from 1 to 128, got 1000000000.0
        expected a whole number from 1 to 128, got 128.0
        expected a whole number from 1 to 128, got 0
        expected a whole number from 1 to 128, got -1
        expected a whole number from 1 to 128, got -1e+30
        expected a whole number, 0 or above, got "5"
        "#);
    }

    #[test]
    fn a_list_names_the_id_that_is_none() {
        let of = |value: Value| ids(value.as_array().unwrap());
        assert_eq!(of(json!([5, u32::MAX])), Ok(vec![5, u32::MAX]));
        let (index, fault) = of(json!([5, 1u64 << 32, -1])).unwrap_err();
        insta::assert_snapshot!(format!("{index}: {fault}"), @"1: expected at most 4294967295, got 4294967296");
    }
}
