//! Stretches of held-out text to measure on.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use deepseek_model::memory::check_text;
use indicatif::HumanCount;

use crate::count;
use crate::io;
use crate::model::{Checkpoint, blame_text};
use crate::overlap::{self, STRETCH, Twin};

/// What comes of contexts that have much in common.
const WIDER: &str = "the standard error is larger than it seems";

/// A context, and what really follows each of its last rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window<'a> {
    /// The text's file.
    pub file: &'a Path,
    /// Where in the text, in tokens, the context begins.
    pub start: usize,
    /// The beginning-of-text id, if the model has one, and a stretch of text.
    pub context: Vec<u32>,
    /// The tokens after the last rows, one per row.
    pub targets: &'a [u32],
}

/// The texts, as token ids, each with its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    texts: Vec<(PathBuf, Vec<u32>)>,
    bos: Option<u32>,
}

impl Texts {
    /// Reads and encodes the files; `-` is `stdin`.
    ///
    /// # Errors
    /// Names the file that cannot be read, is no UTF-8 text, is empty, or is the text of an earlier
    /// one: contexts that are measured twice would count as two.
    pub fn load(
        files: &[PathBuf],
        checkpoint: &Checkpoint,
        stdin: &mut dyn Read,
    ) -> anyhow::Result<Self> {
        let mut texts: Vec<(PathBuf, Vec<u32>)> = Vec::with_capacity(files.len());
        for file in files {
            let mut read = || {
                let text = io::read_text_or(file, stdin)?;
                ensure!(!text.is_empty(), "the text is empty");
                check_text(text.len())?;
                let ids = checkpoint.tokenizer.encode(&text)?;
                if let Some((other, _)) = texts.iter().find(|(_, other)| *other == ids) {
                    let other = io::shown(other);
                    bail!("expected each text once, got that of --text {other} again");
                }
                Ok(ids)
            };
            let source = format!("--text {}", io::shown(file));
            let ids = read().map_err(|error| blame_text(error, &source))?;
            texts.push((file.clone(), ids));
        }
        Ok(Self {
            texts,
            bos: checkpoint.config.bos_token_id,
        })
    }

    /// Why contexts of these texts say less than their number: a text is mostly another one, or has no
    /// room for `windows_per_text` contexts of one of `lens` tokens beside each other. Such windows must
    /// be there.
    pub fn notes(&self, lens: &[usize], windows_per_text: usize) -> Vec<String> {
        let name = |index: usize| format!("--text {}", io::shown(&self.texts[index].0));
        let ids: Vec<&[u32]> = self.texts.iter().map(|(_, text)| &text[..]).collect();
        let mut notes = Vec::new();
        for Twin { text, of, percent } in overlap::twins(&ids) {
            let (text, of) = (name(text), name(of));
            notes.push(format!(
                "note: {text} and {of} have {percent} % of their stretches of {STRETCH} tokens in common: \
                 {WIDER}"
            ));
        }
        for &len in lens {
            let taken = len - usize::from(self.bos.is_some());
            for (index, ids) in ids.iter().enumerate() {
                let step = (ids.len() - taken - 1) / (windows_per_text - 1).max(1);
                let percent = taken.saturating_sub(step) * 100 / taken.max(1);
                if windows_per_text > 1 && percent > 50 {
                    notes.push(format!(
                        "note: --windows {windows_per_text}: contexts of {} that follow each other in {} \
                         have {percent} % in common: {WIDER}",
                        count(len, "token"),
                        name(index)
                    ));
                }
            }
        }
        notes
    }

    /// Refuses texts without room for `windows_per_text` different windows of `len` tokens, the last `rows` of
    /// which are scored. There is room for shorter ones, too.
    ///
    /// # Errors
    /// Names the text, how many tokens it would need, and which flags would make it do.
    pub fn check(&self, len: usize, rows: usize, windows_per_text: usize) -> anyhow::Result<()> {
        let begun = usize::from(self.bos.is_some());
        // Flags that do for the shortest do for all.
        if let Some((file, text)) = self.texts.iter().min_by_key(|(_, text)| text.len()) {
            // A window of one begins at a token of its own, and the last is followed by one more.
            let (tokens, taken) = (text.len(), len - begun);
            let least = taken.saturating_add(windows_per_text);
            if tokens >= least {
                return Ok(());
            }
            let mut help = vec!["give a longer text".to_owned()];
            // Of one window, then of as many as were asked for.
            let longest = (tokens + begun).saturating_sub(1);
            let longest_of_all = (tokens + begun).saturating_sub(windows_per_text);
            if tokens > taken {
                help.push(format!("lower --windows to {}", tokens - taken));
            }
            if longest_of_all >= rows.max(1) {
                help.push(format!("lower --contexts to {longest_of_all}"));
            } else if longest >= rows {
                if tokens <= taken {
                    let shortest = rows.max(1);
                    help.push(format!(
                        "lower --contexts to {shortest} and --windows to {}",
                        tokens + begun - shortest
                    ));
                }
            } else if longest_of_all > 0 {
                help.push(format!(
                    "lower --contexts and --last-rows to {longest_of_all}"
                ));
            } else if longest > 0 {
                help.push(format!(
                    "lower --contexts and --last-rows to {longest} and --windows to 1"
                ));
            }
            bail!(
                "--text {}: expected at least {} for {} of {} (--windows, --contexts){}, got {}: {}",
                io::shown(file),
                count(least, "token"),
                count(windows_per_text, "context"),
                count(len, "token"),
                if begun > 0 {
                    ", the first of which is the beginning-of-text token"
                } else {
                    ""
                },
                HumanCount(tokens as u64),
                help.join(", or ")
            );
        }
        Ok(())
    }

    /// `windows_per_text` windows of `len` tokens of each text, their beginnings spread evenly from one end
    /// to the other, with the targets of the last `rows` rows. There must be [room](Self::check) for them.
    pub fn windows(&self, len: usize, rows: usize, windows_per_text: usize) -> Vec<Window<'_>> {
        let taken = len - usize::from(self.bos.is_some());
        let mut windows = Vec::new();
        for (file, text) in &self.texts {
            let last_start = text.len() - taken - 1;
            for window in 0..windows_per_text {
                let start = last_start * window / (windows_per_text - 1).max(1);
                let end = start + taken;
                let mut context: Vec<u32> = self.bos.into_iter().collect();
                context.extend_from_slice(&text[start..end]);
                // The row of the last token predicts the one behind it.
                windows.push(Window {
                    file,
                    start,
                    context,
                    targets: &text[end + 1 - rows..=end],
                });
            }
        }
        windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(bos: Option<u32>) -> Texts {
        Texts {
            texts: vec![
                ("a.txt".into(), (100..110).collect()),
                ("b.txt".into(), (200..220).collect()),
            ],
            bos,
        }
    }

    #[test]
    fn windows_reach_from_end_to_end() {
        let texts = texts(None);
        let windows = texts.windows(5, 2, 3);
        let starts: Vec<u32> = windows.iter().map(|window| window.context[0]).collect();
        assert_eq!(starts, [100, 102, 104, 200, 207, 214]);
        assert_eq!(windows[2].context, [104, 105, 106, 107, 108]);
        assert_eq!(windows[2].targets, [108, 109]);
        assert_eq!(windows[5].targets, [218, 219]);
        assert_eq!((windows[4].file, windows[4].start), (Path::new("b.txt"), 7));
    }

    #[test]
    fn a_first_token_of_the_model_s_own_counts_as_one() {
        let texts = texts(Some(0));
        let windows = texts.windows(5, 3, 1);
        assert_eq!(windows[0].context, [0, 100, 101, 102, 103]);
        assert_eq!(windows[0].targets, [102, 103, 104]);
    }

    /// What the refusal asks for must do, and one token less must not.
    #[test]
    fn a_text_without_room_is_told_how_long_it_must_be() {
        let of = |tokens: u32, bos| Texts {
            texts: vec![("a.txt".into(), (0..tokens).collect())],
            bos,
        };
        for bos in [None, Some(0)] {
            for (len, rows, windows) in [(64, 8, 1), (64, 8, 8), (8, 8, 1), (8, 8, 3), (1, 1, 1)] {
                let refusal = of(0, bos)
                    .check(len, rows, windows)
                    .unwrap_err()
                    .to_string();
                let least = refusal.split("at least ").nth(1).unwrap();
                let least: u32 = least.split(' ').next().unwrap().parse().unwrap();
                of(least - 1, bos).check(len, rows, windows).unwrap_err();
                let texts = of(least, bos);
                texts.check(len, rows, windows).unwrap();
                let cut = texts.windows(len, rows, windows);
                let distinct = cut.windows(2).all(|pair| pair[0].start < pair[1].start);
                assert!(cut.len() == windows && distinct, "{bos:?} {len} {windows}");
            }
        }
    }

    /// Else who follows the advice is refused again, for the next text.
    #[test]
    fn of_several_texts_the_shortest_is_named() {
        let texts = Texts {
            texts: [30, 12, 20]
                .map(|n| (format!("{n}.txt").into(), (0..n).collect()))
                .into(),
            bos: None,
        };
        let refused = texts.check(10, 1, 40).unwrap_err().to_string();
        assert!(refused.starts_with("--text 12.txt: "), "{refused}");
        assert!(refused.contains("lower --windows to 2"), "{refused}");
        texts.check(10, 1, 2).unwrap();
    }

    #[test]
    fn flags_that_a_shorter_text_would_do_with_are_named() {
        let refuse = |tokens: u32, bos, (len, rows, windows)| {
            let texts = Texts {
                texts: vec![("a.txt".into(), (0..tokens).collect())],
                bos,
            };
            texts.check(len, rows, windows).unwrap_err().to_string()
        };
        insta::assert_snapshot!(refuse(10, None, (10, 1, 1)), @"--text a.txt: expected at least 11 tokens for 1 context of 10 tokens (--windows, --contexts), got 10: give a longer text, or lower --contexts to 9");
        insta::assert_snapshot!(refuse(10, Some(0), (64, 8, 1)), @"--text a.txt: expected at least 64 tokens for 1 context of 64 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 10: give a longer text, or lower --contexts to 10");
        insta::assert_snapshot!(refuse(20, None, (14, 8, 8)), @"--text a.txt: expected at least 22 tokens for 8 contexts of 14 tokens (--windows, --contexts), got 20: give a longer text, or lower --windows to 6, or lower --contexts to 12");
        insta::assert_snapshot!(refuse(20, None, (18, 16, 8)), @"--text a.txt: expected at least 26 tokens for 8 contexts of 18 tokens (--windows, --contexts), got 20: give a longer text, or lower --windows to 2");
        insta::assert_snapshot!(refuse(20, None, (64, 8, 16)), @"--text a.txt: expected at least 80 tokens for 16 contexts of 64 tokens (--windows, --contexts), got 20: give a longer text, or lower --contexts to 8 and --windows to 12");
        insta::assert_snapshot!(refuse(7, Some(0), (64, 8, 1)), @"--text a.txt: expected at least 64 tokens for 1 context of 64 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 7: give a longer text, or lower --contexts and --last-rows to 7");
        insta::assert_snapshot!(refuse(2, Some(0), (9, 8, 3)), @"--text a.txt: expected at least 11 tokens for 3 contexts of 9 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 2: give a longer text, or lower --contexts and --last-rows to 2 and --windows to 1");
        insta::assert_snapshot!(refuse(4, Some(0), (9, 8, 3)), @"--text a.txt: expected at least 11 tokens for 3 contexts of 9 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 4: give a longer text, or lower --contexts and --last-rows to 2");
        insta::assert_snapshot!(refuse(0, None, (1, 1, 1)), @"--text a.txt: expected at least 2 tokens for 1 context of 1 token (--windows, --contexts), got 0: give a longer text");
    }

    /// A refusal's own numbers, where they are given as flags.
    #[test]
    fn flags_as_a_refusal_says_will_do() {
        let texts = texts(Some(0));
        let refusal = texts.check(9, 2, 4).unwrap_err().to_string();
        let number = |flag: &str| -> usize {
            let after = refusal.split(&format!("lower {flag} to ")).nth(1).unwrap();
            after.split([',', ' ']).next().unwrap().parse().unwrap()
        };
        texts.check(9, 2, number("--windows")).unwrap();
        texts.check(9, 2, number("--windows") + 1).unwrap_err();
        texts.check(number("--contexts"), 2, 4).unwrap();
        texts.check(number("--contexts") + 1, 2, 4).unwrap_err();

        let texts = Texts {
            texts: vec![("a.txt".into(), (0..20).collect())],
            bos: None,
        };
        let refusal = texts.check(64, 8, 16).unwrap_err().to_string();
        assert!(refusal.ends_with("lower --contexts to 8 and --windows to 12"));
        texts.check(8, 8, 12).unwrap();
        texts.check(8, 8, 13).unwrap_err();

        // Named beside each other, the flags go with each other: there was another refusal behind this one.
        for (tokens, len, rows, windows) in [(4, 9, 8, 3), (10, 64, 32, 1), (2, 9, 8, 3)] {
            let texts = Texts {
                texts: vec![("a.txt".into(), (0..tokens).collect())],
                bos: Some(0),
            };
            let refusal = texts.check(len, rows, windows).unwrap_err().to_string();
            let of = |flags: &str| -> Option<usize> {
                let number = refusal.split(&format!("{flags} to ")).nth(1)?;
                number.split(' ').next()?.parse().ok()
            };
            let most = of("--contexts and --last-rows").unwrap();
            let windows = of("and --windows").unwrap_or(windows);
            texts.check(most, most, windows).unwrap();
            texts.check(most + 1, most + 1, windows).unwrap_err();
        }
    }

    /// The help says that the standard error is then larger than it seems; so must the output.
    #[test]
    fn contexts_that_are_not_independent_are_noted() {
        let texts = Texts {
            texts: vec![
                ("a.txt".into(), (0..1000).collect()),
                ("b.txt".into(), (2000..3000).collect()),
                ("c.txt".into(), (100..1000).collect()),
            ],
            bos: None,
        };
        let notes = texts.notes(&[100, 400], 4);
        insta::assert_snapshot!(notes.join("\n"), @r"
        note: --text c.txt and --text a.txt have 100 % of their stretches of 32 tokens in common: the standard error is larger than it seems
        note: --windows 4: contexts of 400 tokens that follow each other in --text c.txt have 58 % in common: the standard error is larger than it seems
        ");
        assert_eq!(
            texts.notes(&[900 - 1], 1).len(),
            1,
            "one context has no neighbour"
        );
    }

    #[test]
    fn as_many_windows_as_there_are_beginnings() {
        let texts = texts(None);
        texts.check(7, 1, 3).unwrap();
        let windows = texts.windows(7, 1, 3);
        let starts: Vec<u32> = windows.iter().map(|window| window.context[0]).collect();
        assert_eq!(starts, [100, 101, 102, 200, 206, 212]);
        texts.check(7, 1, u32::MAX as usize).unwrap_err();
    }
}
