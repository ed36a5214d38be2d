//! How much of a text another text holds.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens of a stretch. Independent texts have none of that length in common, but for quotations.
pub(crate) const STRETCH: usize = 32;

/// Stretches of the longest text that are looked at, about. Which they are depends on their tokens alone,
/// so that both texts are asked for the same.
const LOOKED_AT: usize = 1 << 16;

/// A text that is mostly an earlier one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Twin {
    /// The text, by its place.
    pub(crate) text: usize,
    /// The earlier text.
    pub(crate) of: usize,
    /// Stretches that both have, wherever they stand, of those of the shorter text: above 50.
    pub(crate) percent: usize,
}

/// Every text that has more than half of its stretches in common with an earlier one, or holds more
/// than half of its, with the first such.
pub(crate) fn twins(texts: &[&[u32]]) -> Vec<Twin> {
    let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
    let every = (longest / LOOKED_AT).max(1) as u64;
    let stretches: Vec<_> = texts.iter().map(|text| stretches(text, every)).collect();
    let twin = |text: usize| {
        (0..text).find_map(|of| {
            let percent = shared(&stretches[text], &stretches[of]);
            (percent > 50).then_some(Twin { text, of, percent })
        })
    };
    (1..texts.len()).filter_map(twin).collect()
}

/// One of `every` stretches of a text, as numbers that stand for them.
fn stretches(text: &[u32], every: u64) -> HashSet<u64> {
    let number = |stretch: &[u32]| {
        let mut hasher = DefaultHasher::new();
        stretch.hash(&mut hasher);
        hasher.finish()
    };
    let numbers = text.windows(STRETCH).map(number);
    numbers.filter(|number| number % every == 0).collect()
}

/// Percent of the smaller set that are in both.
fn shared(a: &HashSet<u64>, b: &HashSet<u64>) -> usize {
    let fewest = a.len().min(b.len()).max(1);
    a.intersection(b).count() * 100 / fewest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without any pattern.
    fn text(seed: u32, len: u32) -> Vec<u32> {
        let number = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13) % 5000;
        (0..len).map(number).collect()
    }

    /// One token of 100 changed leaves 68 stretches of each 100 whole; wherever they stand.
    #[test]
    fn small_edits_do_not_make_another_text() {
        let first = text(1, 5000);
        let mut edited = first.clone();
        edited.iter_mut().step_by(100).for_each(|token| *token += 1);
        edited.rotate_left(1234);
        let other = text(1 << 20, 5000);
        let twins = twins(&[&first, &other, &edited]);
        assert_eq!((twins.len(), twins[0].text, twins[0].of), (1, 2, 0));
        assert!((66..=70).contains(&twins[0].percent), "{twins:?}");
    }

    /// Contexts of a part are contexts of the whole.
    #[test]
    fn a_part_is_a_twin_of_the_whole() {
        let whole = text(1, 300_000);
        let part = &whole[100_000..130_000];
        for texts in [[part, &whole], [&whole, part]] {
            let expected = Twin {
                text: 1,
                of: 0,
                percent: 100,
            };
            assert_eq!(twins(&texts), [expected]);
        }
    }

    #[test]
    fn texts_of_less_than_a_stretch_have_nothing_in_common() {
        let short = text(1, STRETCH as u32 - 1);
        assert_eq!(twins(&[&short, &short, &[]]), []);
        assert_eq!(twins(&[]), []);
    }
}
