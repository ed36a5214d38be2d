//! Stretches of held-out text to measure on.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::count;
use crate::flags::Blame;
use crate::io;
use crate::model::Checkpoint;
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
        let of_stdin = files.iter().filter(|file| io::is_dash(file)).count();
        ensure!(
            of_stdin <= 1,
            Blame::misuse("--text -: standard input can be read only once")
        );
        for file in files {
            let mut read = || {
                let text = io::read_text_or(file, stdin)?;
                ensure!(!text.is_empty(), "the text is empty");
                let ids = checkpoint.tokenizer.encode(&text)?;
                if let Some((other, _)) = texts.iter().find(|(_, other)| *other == ids) {
                    let other = io::shown(other);
                    bail!("expected each text once, got that of --text {other} again");
                }
                Ok(ids)
            };
            let ids = read().with_context(|| format!("--text {}", io::shown(file)))?;
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

    /// `windows_per_text` windows of `len` tokens of each text, their beginnings spread evenly from one end
    /// to the other, with the targets of the last `rows` rows.
    ///
    /// # Errors
    /// A text is shorter than a window, or has fewer distinct windows than that.
    pub fn windows(
        &self,
        len: usize,
        rows: usize,
        windows_per_text: usize,
    ) -> anyhow::Result<Vec<Window<'_>>> {
        let begun = usize::from(self.bos.is_some());
        let taken = len - begun;
        let mut windows = Vec::new();
        for (file, text) in &self.texts {
            let (tokens, name) = (text.len(), io::shown(file));
            // A context of the scored rows alone, and the token that follows it.
            let least = (rows - begun + 1).max(1);
            ensure!(
                tokens >= least,
                "--text {name}: expected at least {} to score {} (--last-rows), got {tokens}: give a longer \
                 text, or lower --last-rows",
                count(least, "token"),
                count(rows, "row")
            );
            ensure!(
                tokens > taken,
                "--contexts {len}: expected at most {}, --text {name} has {}{}: lower --contexts, or give a \
                 longer text",
                tokens - 1 + begun,
                count(tokens, "token"),
                if begun > 0 {
                    " without the beginning-of-text token"
                } else {
                    ""
                }
            );
            let starts = tokens - taken;
            ensure!(
                windows_per_text <= starts,
                "--windows {windows_per_text}: expected at most {starts}, --text {name} has no more \
                 contexts of {} that differ: lower --windows or --contexts",
                count(len, "token")
            );
            let last_start = starts - 1;
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
        Ok(windows)
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
        let windows = texts.windows(5, 2, 3).unwrap();
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
        let windows = texts.windows(5, 3, 1).unwrap();
        assert_eq!(windows[0].context, [0, 100, 101, 102, 103]);
        assert_eq!(windows[0].targets, [102, 103, 104]);
    }

    #[test]
    fn a_text_shorter_than_the_window_is_named() {
        let texts = texts(None);
        assert!(texts.windows(9, 1, 1).is_ok());
        let error = texts.windows(10, 1, 4).unwrap_err();
        insta::assert_snapshot!(error, @"--contexts 10: expected at most 9, --text a.txt has 10 tokens: lower --contexts, or give a longer text");
    }

    /// No flag makes such a text long enough: an empty one once made the bound wrap.
    #[test]
    fn a_text_too_short_for_any_context_is_blamed_itself() {
        let of = |tokens: u32, bos| Texts {
            texts: vec![("a.txt".into(), (0..tokens).collect())],
            bos,
        };
        let refuse = |tokens, bos, rows| of(tokens, bos).windows(64, rows, 1).unwrap_err();
        insta::assert_snapshot!(refuse(0, None, 1), @"--text a.txt: expected at least 2 tokens to score 1 row (--last-rows), got 0: give a longer text, or lower --last-rows");
        insta::assert_snapshot!(refuse(0, Some(0), 1), @"--text a.txt: expected at least 1 token to score 1 row (--last-rows), got 0: give a longer text, or lower --last-rows");
        insta::assert_snapshot!(refuse(7, Some(0), 8), @"--text a.txt: expected at least 8 tokens to score 8 rows (--last-rows), got 7: give a longer text, or lower --last-rows");
        insta::assert_snapshot!(refuse(8, Some(0), 8), @"--contexts 64: expected at most 8, --text a.txt has 8 tokens without the beginning-of-text token: lower --contexts, or give a longer text");
        assert!(of(8, Some(0)).windows(8, 8, 1).is_ok());
        assert!(of(9, None).windows(8, 8, 1).is_ok());
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
    fn more_windows_than_there_are_beginnings_are_refused() {
        let texts = texts(None);
        let windows = texts.windows(7, 1, 3).unwrap();
        let starts: Vec<u32> = windows.iter().map(|window| window.context[0]).collect();
        assert_eq!(starts, [100, 101, 102, 200, 206, 212]);
        let error = texts.windows(7, 1, u32::MAX as usize).unwrap_err();
        insta::assert_snapshot!(error, @"--windows 4294967295: expected at most 3, --text a.txt has no more contexts of 7 tokens that differ: lower --windows or --contexts");
    }
}
