//! Stop texts: what of a text can be given before it is known where it ends.

/// Finds the stop text that ends a text which comes in pieces.
///
/// That is the one that begins earliest, and of those that begin there the shortest. So one that is
/// complete still waits for another that began before it and may become complete: how the text is cut into
/// pieces changes when something is known, never what.
#[derive(Debug)]
pub(super) struct StopTexts {
    /// None is empty.
    stops: Vec<String>,
    /// The end of the text so far that may be the beginning of a stop text.
    held: String,
}

/// What became certain of a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Certain {
    /// Text before the first stop text, without what was certain before.
    pub(super) text: String,
    /// Which stop text ended it. Nothing may be pushed after that.
    pub(super) stop: Option<usize>,
}

impl StopTexts {
    /// At the beginning of a text. Without stop texts nothing is ever held back.
    pub(super) fn new(stops: Vec<String>) -> Self {
        debug_assert!(stops.iter().all(|stop| !stop.is_empty()));
        let held = String::new();
        Self { stops, held }
    }

    /// Takes the next piece of the text.
    pub(super) fn push(&mut self, piece: &str) -> Certain {
        self.held.push_str(piece);
        self.give(false)
    }

    /// The text has ended: what was held back.
    pub(super) fn finish(&mut self) -> Certain {
        self.give(true)
    }

    fn give(&mut self, ended: bool) -> Certain {
        let (end, stop) = self.search(ended);
        let rest = self.held.split_off(end);
        Certain {
            text: std::mem::replace(&mut self.held, rest),
            stop,
        }
    }

    /// Up to where the text is certain, and the stop text there if it is complete.
    fn search(&self, ended: bool) -> (usize, Option<usize>) {
        for (at, _) in self.held.char_indices() {
            let rest = &self.held[at..];
            let stops = self.stops.iter().enumerate();
            let complete = stops.filter(|(_, stop)| rest.starts_with(stop.as_str()));
            if let Some((index, _)) = complete.min_by_key(|(_, stop)| stop.len()) {
                return (at, Some(index));
            }
            if !ended && self.stops.iter().any(|stop| stop.starts_with(rest)) {
                return (at, None);
            }
        }
        (self.held.len(), None)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Texts that become certain with each piece and in the end, up to a stop text.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher = StopTexts::new(stops.iter().map(ToString::to_string).collect());
        let mut texts = Vec::new();
        for piece in pieces {
            let certain = matcher.push(piece);
            texts.push(certain.text);
            if certain.stop.is_some() {
                return (texts, certain.stop);
            }
        }
        let certain = matcher.finish();
        texts.push(certain.text);
        (texts, certain.stop)
    }

    #[track_caller]
    fn check(stops: &[&str], pieces: &[&str], texts: &[&str], stop: Option<usize>) {
        let (got, which) = run(stops, pieces);
        assert_eq!(
            (got.iter().map(String::as_str).collect(), which),
            (texts.to_vec(), stop)
        );
    }

    /// What may be the beginning of a stop text waits, and nothing else does.
    #[test]
    fn only_what_may_be_a_stop_text_waits() {
        check(&[], &["a", "", "b"], &["a", "", "b", ""], None);
        check(&["END"], &["xE", "N", "d"], &["x", "", "ENd", ""], None);
        check(&["END"], &["xE", "N", "DE"], &["x", "", ""], Some(0));
        check(&["END"], &["EEN", "D"], &["E", ""], Some(0));
        check(&["END"], &["xEN"], &["x", "EN"], None);
        check(&["aab"], &["aa", "a", "b"], &["", "a", ""], Some(0));
    }

    /// The earliest wins, the shortest of those that begin alike; one that is complete waits for one that
    /// began before it, until that one is complete or is not.
    #[test]
    fn the_earliest_wins() {
        check(&["cd", "abcdef"], &["abcd", "ef"], &["", ""], Some(1));
        check(&["cd", "abcdef"], &["abcdef"], &[""], Some(1));
        check(&["cd", "abcdef"], &["abcd", "ex"], &["", "ab"], Some(0));
        check(&["cd", "abcdef"], &["abcd"], &["", "ab"], Some(0));
        check(&["abc", "ab"], &["xabc"], &["x"], Some(1));
        check(&["b", "b"], &["ab"], &["a"], Some(0));
        check(&["ab", "bc"], &["abc"], &[""], Some(0));
    }

    /// Characters of several bytes are not cut.
    #[test]
    fn characters_stay_whole() {
        check(&["éa"], &["xé", "b"], &["x", "éb", ""], None);
        check(&["é"], &["ê", "è", "é"], &["ê", "è", ""], Some(0));
    }

    /// The definition, by a search of the whole text.
    fn earliest(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        let found =
            |(index, stop): (usize, &String)| Some((text.find(stop.as_str())?, stop.len(), index));
        let first = stops.iter().enumerate().filter_map(found).min();
        first.map(|(at, _, index)| (at, index))
    }

    proptest! {
        /// Whatever the pieces are: the text up to the earliest stop text, and nothing of it at any time.
        #[test]
        fn pieces_change_nothing(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let text = pieces.concat();
            let want = earliest(&text, &stops);
            let mut matcher = StopTexts::new(stops.clone());
            let (mut given, mut stop, mut seen) = (String::new(), None, String::new());
            for piece in &pieces {
                seen.push_str(piece);
                let certain = matcher.push(piece);
                given.push_str(&certain.text);
                stop = certain.stop;
                if stop.is_some() {
                    break;
                }
                // What is held back is the beginning of a stop text, or goes on from one.
                let held = &seen[given.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
            }
            if stop.is_none() {
                let certain = matcher.finish();
                given.push_str(&certain.text);
                stop = certain.stop;
            }
            prop_assert_eq!(stop, want.map(|(_, index)| index));
            prop_assert_eq!(&given, &text[..want.map_or(text.len(), |(at, _)| at)]);
        }
    }
}
