//! Prompts from flags, files and stdin.

use std::fmt;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use deepseek_model::memory::check_text;

use crate::flags::{self, Blame};
use crate::io;
use crate::model::{Checkpoint, blame_text};

/// Where prompts come from.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PromptArgs {
    /// A prompt, with \n for a newline, \t for a tab and \\ for a backslash. Several make a batch.
    ///
    /// Any other backslash stays as it is. The beginning-of-text token comes first by itself; the
    /// spelling of any special token of tokenizer.json becomes that token, here and in a file.
    #[arg(
        long,
        value_name = "TEXT",
        value_parser = flags::text(|text| Ok::<_, String>(text.to_owned())),
        allow_hyphen_values = true
    )]
    pub prompt: Vec<String>,
    /// A file that is a prompt, as it stands; - is standard input. Comes after every --prompt.
    ///
    /// Backslashes stay as they are, and so do line ends, the last one too. A byte-order mark, with which
    /// some programs begin a text, is left out.
    #[arg(long, value_name = "PATH", allow_hyphen_values = true)]
    pub prompt_file: Vec<PathBuf>,
}

/// A prompt and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The flag that named it.
    pub source: Source,
    /// Its text, never empty.
    pub text: String,
}

/// The flag that named a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `--prompt`, the how-manieth, from 1.
    Flag(usize),
    /// `--prompt-file`.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(number) => write!(f, "--prompt number {number}"),
            Self::File(path) => write!(f, "--prompt-file {}", io::shown(path)),
        }
    }
}

impl PromptArgs {
    /// Refuses what no file makes right.
    ///
    /// # Errors
    /// There is no prompt, one is empty, or standard input is to be two.
    pub fn check(&self) -> anyhow::Result<()> {
        let of_stdin = self.prompt_file.iter().filter(|path| io::is_dash(path));
        ensure!(
            of_stdin.count() <= 1,
            Blame::misuse("--prompt-file -: standard input can be read only once")
        );
        ensure!(
            !(self.prompt.is_empty() && self.prompt_file.is_empty()),
            Blame::misuse("there is no prompt: give one with --prompt TEXT or --prompt-file PATH")
        );
        if let Some(empty) = self.prompt.iter().position(String::is_empty) {
            let source = Source::Flag(empty + 1);
            bail!(Blame::misuse(format!("{source}: the prompt is empty")));
        }
        Ok(())
    }

    /// Reads all prompts, which were [checked](Self::check).
    ///
    /// # Errors
    /// A file is empty or cannot be read as UTF-8 text.
    pub fn collect(&self, stdin: &mut dyn Read) -> anyhow::Result<Vec<Prompt>> {
        let mut prompts: Vec<Prompt> = (1..)
            .zip(&self.prompt)
            .map(|(number, text)| Prompt {
                source: Source::Flag(number),
                text: unescape(text),
            })
            .collect();
        for path in &self.prompt_file {
            let source = Source::File(path.clone());
            let text = io::read_text_or(path, stdin).with_context(|| source.to_string())?;
            ensure!(!text.is_empty(), "{source}: the prompt is empty");
            prompts.push(Prompt { source, text });
        }
        Ok(prompts)
    }
}

impl Prompt {
    /// The prompt's token ids, behind the beginning-of-text id if the model has one.
    ///
    /// # Errors
    /// No token, or more tokens than the model has positions.
    pub fn encode(&self, checkpoint: &Checkpoint) -> anyhow::Result<Vec<u32>> {
        encode(&self.text, checkpoint).map_err(|error| blame_text(error, &self.source))
    }
}

/// The token ids of a prompt, behind the beginning-of-text id if the model has one.
///
/// # Errors
/// No token, or more tokens than the model has positions.
pub(crate) fn encode(text: &str, checkpoint: &Checkpoint) -> anyhow::Result<Vec<u32>> {
    let Checkpoint { config, tokenizer } = checkpoint;
    // Before anything is encoded, which takes memory many times the text's own.
    tokenizer.check_length(text, config.max_positions)?;
    check_text(text.len())?;
    let ids = match config.bos_token_id {
        Some(bos) => tokenizer.encode_with_bos(bos, text)?,
        None => tokenizer.encode(text)?,
    };
    ensure!(
        ids.len() <= config.max_positions,
        "the prompt has {} tokens, the model takes {} (max_position_embeddings): shorten it",
        ids.len(),
        config.max_positions
    );
    Ok(ids)
}

/// Replaces `\n`, `\t` and `\\`; any other backslash stays, so that most texts need no thought.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let (replacement, used) = match rest[at + 1..].chars().next() {
            Some('n') => ('\n', 2),
            Some('t') => ('\t', 2),
            Some('\\') => ('\\', 2),
            _ => ('\\', 1),
        };
        out.push(replacement);
        rest = &rest[at + used..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn args(prompts: &[&str], files: &[&Path]) -> PromptArgs {
        PromptArgs {
            prompt: prompts.iter().map(ToString::to_string).collect(),
            prompt_file: files.iter().map(|path| path.to_path_buf()).collect(),
        }
    }

    #[track_caller]
    fn refusal(args: &PromptArgs, stdin: &[u8]) -> String {
        let here = std::env::current_dir().unwrap().display().to_string();
        let prompts = args.check().and_then(|()| args.collect(&mut &*stdin));
        format!("{:#}", prompts.unwrap_err()).replace(&here, "HERE")
    }

    #[test]
    fn escapes_become_what_they_stand_for() {
        assert_eq!(unescape(r"MACBETH.\nTo-morrow"), "MACBETH.\nTo-morrow");
        assert_eq!(unescape(r"a\tb\\n\d é\"), "a\tb\\n\\d é\\");
        assert_eq!(unescape(""), "");
    }

    #[test]
    fn prompts_come_in_order_flags_first() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("prompt.txt");
        std::fs::write(&file, "from\\n a file\n").unwrap();
        let args = args(&["one", "two"], &[Path::new("-"), &file]);
        let prompts = args.collect(&mut &b"piped"[..]).unwrap();
        let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        assert_eq!(texts, ["one", "two", "piped", "from\\n a file\n"]);
        assert_eq!(prompts[1].source.to_string(), "--prompt number 2");
        assert_eq!(prompts[2].source.to_string(), "--prompt-file -");
    }

    #[test]
    fn a_missing_or_empty_prompt_is_refused() {
        insta::assert_snapshot!(
            refusal(&args(&[], &[]), b""),
            @"there is no prompt: give one with --prompt TEXT or --prompt-file PATH"
        );
        insta::assert_snapshot!(
            refusal(&args(&["a", ""], &[]), b""),
            @"--prompt number 2: the prompt is empty"
        );
        insta::assert_snapshot!(
            refusal(&args(&[], &[Path::new("-")]), b""),
            @"--prompt-file -: the prompt is empty"
        );
    }

    /// Some programs begin a text in UTF-8 with a mark that nobody sees and that is a token of its own.
    #[test]
    fn a_byte_order_mark_is_no_part_of_a_prompt() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("prompt.txt");
        std::fs::write(&file, "\u{feff}a\u{feff}b").unwrap();
        let stdin = "\u{feff}c".as_bytes();
        let prompts = args(&[], &[&file, Path::new("-")]).collect(&mut &*stdin);
        let prompts = prompts.unwrap();
        assert_eq!(prompts[0].text, "a\u{feff}b", "only at the beginning");
        assert_eq!(prompts[1].text, "c");
        let only = refusal(&args(&[], &[Path::new("-")]), "\u{feff}".as_bytes());
        insta::assert_snapshot!(only, @"--prompt-file -: the prompt is empty");
        let utf16 = refusal(&args(&[], &[Path::new("-")]), b"\xff\xfea\0");
        insta::assert_snapshot!(utf16, @"--prompt-file -: expected UTF-8 text, got UTF-16, by its byte-order mark");
    }

    /// The system says that there is no such file, though there is something of that name.
    #[cfg(unix)]
    #[test]
    fn a_link_to_nowhere_says_where_it_leads() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("prompt.txt");
        std::os::unix::fs::symlink("no/such.txt", &link).unwrap();
        let text = refusal(&args(&[], &[&link]), b"");
        let text = text.replace(dir.path().to_str().unwrap(), "DIR");
        insta::assert_snapshot!(text, @"--prompt-file DIR/prompt.txt: expected a file, found a symbolic link to no/such.txt, which is not there");
    }

    #[test]
    fn unreadable_files_are_named() {
        insta::assert_snapshot!(
            refusal(&args(&[], &[Path::new("no/such.txt")]), b""),
            @"--prompt-file no/such.txt: cannot read HERE/no/such.txt: No such file or directory (os error 2)"
        );
        insta::assert_snapshot!(
            refusal(&args(&[], &[Path::new("src")]), b""),
            @"--prompt-file src: cannot read HERE/src: expected a file, found a directory"
        );
        insta::assert_snapshot!(
            refusal(&args(&[], &[Path::new("-")]), b"\xff"),
            @"--prompt-file -: expected UTF-8 text, got byte 0xff at offset 0"
        );
        insta::assert_snapshot!(
            refusal(&args(&[], &[Path::new("-"), Path::new("-")]), b"x"),
            @"--prompt-file -: standard input can be read only once"
        );
    }
}
