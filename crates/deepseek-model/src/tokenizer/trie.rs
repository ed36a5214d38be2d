//! Whether the table of a `Precompiled` normalizer leads where it should: the library follows it without a
//! look, and answers a text that is led out of it with a panic.
//!
//! The table is a trie in an array. A unit says where those of the bytes that may come next are, and
//! whether a text ends there, whose replacement stands behind the trie.

/// Bytes of the longest text that the library looks up.
const LONGEST: usize = 5;

/// Refuses a trie that some text leads out of, or that has a replacement outside of `texts`, which stand
/// behind it.
///
/// # Errors
/// Says where the trie leads.
pub(super) fn check(trie: &[u8], texts: &[u8]) -> Result<(), String> {
    let units: Vec<usize> = trie
        .chunks_exact(4)
        .map(|unit| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]) as usize)
        .collect();
    let count = units.len();
    let led_out =
        |to: usize| format!("precompiled_charsmap leads to unit {to} of a trie of {count}");
    let root = offset(*units.first().ok_or_else(|| led_out(0))?);
    let mut seen = vec![false; count];
    let mut nodes = vec![root];
    for depth in 1..=LONGEST {
        let mut next = Vec::new();
        for node in nodes {
            // No byte of a text in UTF-8 is above.
            for byte in 1..=0xf4 {
                let at = node ^ byte;
                let unit = *units.get(at).ok_or_else(|| led_out(at))?;
                if label(unit) != byte {
                    continue;
                }
                let child = at ^ offset(unit);
                if has_leaf(unit) {
                    let value = value(*units.get(child).ok_or_else(|| led_out(child))?);
                    check_replacement(value, texts)?;
                }
                // Where nothing comes any more, nobody looks.
                if depth < LONGEST && !seen.get(child).is_some_and(|seen| *seen) {
                    if let Some(seen) = seen.get_mut(child) {
                        *seen = true;
                    }
                    next.push(child);
                }
            }
        }
        nodes = next;
    }
    Ok(())
}

/// A text begins at a character, and ends at a 0 or with all of them.
fn check_replacement(at: usize, texts: &[u8]) -> Result<(), String> {
    let begins = |byte: &u8| byte & 0xc0 != 0x80;
    match texts.get(at) {
        None if at == texts.len() => Ok(()),
        Some(byte) if begins(byte) => Ok(()),
        _ => Err(format!(
            "precompiled_charsmap has a replacement at byte {at}, expected the beginning of a character among \
             the {} bytes behind its trie",
            texts.len()
        )),
    }
}

fn has_leaf(unit: usize) -> bool {
    unit >> 8 & 1 == 1
}

fn value(unit: usize) -> usize {
    unit & 0x7fff_ffff
}

/// The byte that leads to a unit; none if its top bit is set.
fn label(unit: usize) -> usize {
    unit & 0x8000_00ff
}

fn offset(unit: usize) -> usize {
    unit >> 10 << ((unit & 0x200) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trie of one block whose root leads by `a` to unit `leaf`, a replacement at `value`.
    fn trie(leaf: usize, value: u32) -> Vec<u8> {
        let mut units = vec![0_u32; 256];
        let a = usize::from(b'a');
        units[a] = u32::from(b'a') | 1 << 8 | ((a ^ leaf) as u32) << 10;
        if let Some(unit) = units.get_mut(leaf) {
            *unit = value | 1 << 31;
        }
        units.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn a_trie_is_followed_wherever_a_text_leads() {
        let texts = "é\0x\0".as_bytes();
        for value in [0, 2, 3, 4, 5] {
            check(&trie(200, value), texts).unwrap();
        }
        let refuse = |leaf, value| check(&trie(leaf, value), texts).unwrap_err();
        insta::assert_snapshot!(refuse(200, 1), @"precompiled_charsmap has a replacement at byte 1, expected the beginning of a character among the 5 bytes behind its trie");
        insta::assert_snapshot!(refuse(200, 6), @"precompiled_charsmap has a replacement at byte 6, expected the beginning of a character among the 5 bytes behind its trie");
        insta::assert_snapshot!(refuse(256, 0), @"precompiled_charsmap leads to unit 256 of a trie of 256");
        insta::assert_snapshot!(check(&trie(200, 0)[..128], texts).unwrap_err(), @"precompiled_charsmap leads to unit 32 of a trie of 32");
        insta::assert_snapshot!(check(&[], texts).unwrap_err(), @"precompiled_charsmap leads to unit 0 of a trie of 0");
    }
}
