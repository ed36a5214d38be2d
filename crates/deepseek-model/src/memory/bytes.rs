//! Sizes with binary units, written and read.

use std::{fmt, num::IntErrorKind, str::FromStr};

/// A number of bytes: `1.5 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(
    /// The number.
    pub u64,
);

/// The largest first.
const UNITS: [(&str, u64); 6] = [
    ("EiB", 1 << 60),
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, size)| self.0 >= *size) {
            Some((unit, size)) => {
                let text = format!("{:.1}", self.0 as f64 / *size as f64);
                write!(f, "{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
            }
            None => write!(f, "{} B", self.0),
        }
    }
}

impl FromStr for Bytes {
    type Err = String;

    /// A number of bytes, or of a unit that follows it, with or without a space.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            "expected bytes, such as 1000000000, 512MiB or 1.5GiB (units: KiB to EiB)".to_owned()
        };
        let too_large = || "expected less than 16EiB".to_owned();
        let unit = UNITS
            .iter()
            .find_map(|(unit, size)| Some((text.strip_suffix(unit)?, *size)));
        let Some((number, size)) = unit else {
            let bytes = text.parse::<u64>().map(Self);
            return bytes.map_err(|error| match error.kind() {
                IntErrorKind::PosOverflow => too_large(),
                _ => expected(),
            });
        };
        let number = number.trim_end();
        let digits = |c: char| c.is_ascii_digit() || c == '.';
        let value = number
            .parse::<f64>()
            .ok()
            .filter(|_| number.chars().all(digits));
        let bytes = value.ok_or_else(expected)? * size as f64;
        // From there on a float is no whole number of bytes that can be addressed.
        if bytes < u64::MAX as f64 {
            Ok(Self(bytes as u64))
        } else {
            Err(too_large())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [
            ("0 B", 0),
            ("1023 B", 1023),
            ("1 KiB", 1024),
            ("1.5 MiB", 3 << 19),
            ("139.7 GiB", 150_001_732_812),
            ("2 TiB", 2 << 40),
            ("1 PiB", 1 << 50),
            ("1.5 EiB", 3 << 59),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
            if bytes >= 1024 {
                assert_eq!(text.parse(), Ok(Bytes(bytes)));
            }
        }
        assert_eq!("512MiB".parse(), Ok(Bytes(512 << 20)));
        assert_eq!("1000".parse(), Ok(Bytes(1000)));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", "GiB", "1GB", "1.5", "-1GiB", "1e3MiB", "infGiB", "1..2GiB", "1PB", "1ZiB", "x",
        ] {
            let refused = text.parse::<Bytes>().unwrap_err();
            assert_eq!(
                refused, "expected bytes, such as 1000000000, 512MiB or 1.5GiB (units: KiB to EiB)",
                "{text}"
            );
        }
        for text in [
            "99999999999TiB",
            "16777216TiB",
            "16EiB",
            "18446744073709551616",
        ] {
            let refused = text.parse::<Bytes>().unwrap_err();
            assert_eq!(refused, "expected less than 16EiB", "{text}");
        }
        assert_eq!("18446744073709551615".parse(), Ok(Bytes(u64::MAX)));
    }
}
