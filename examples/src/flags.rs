//! From a command line to flags, and what a refusal says: which flag, what came, what would do.

use std::ffi::OsString;
use std::fmt;
use std::num::{IntErrorKind, NonZeroU32, NonZeroUsize, ParseIntError};
use std::str::FromStr;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Parser};
use deepseek_model::ReplayPolicy;
use deepseek_model::plain::ShownBytes;

use crate::io;

/// Parses a command line, the program's name first.
///
/// # Errors
/// What clap says, with arguments of any length cut. No program here takes an argument without a flag:
/// of one that came, it also says what it may have been meant for.
pub fn parse<A: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<A, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    A::try_parse_from(&args).map_err(|mut refusal| {
        let stray = match refusal.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(arg)) => !arg.starts_with('-'),
            _ => false,
        };
        if refusal.kind() == ErrorKind::UnknownArgument && stray {
            let tip = tip(&A::command());
            let tip = ContextValue::StyledStrs(vec![tip.into()]);
            refusal.insert(ContextKind::Suggested, tip);
        }
        name_variable(&mut refusal, A::command(), &args);
        if let Some(empty) = of_empty_path(&refusal, A::command(), &args) {
            return empty;
        }
        name_emptiness(&mut refusal, &args);
        quote(&mut refusal, stray, &args);
        refusal
    })
}

/// Names the variable that a refused value came from: clap names the flag, which nobody gave. Of one that is
/// secret the value is not shown.
fn name_variable(refusal: &mut clap::Error, mut program: Command, args: &[OsString]) {
    // Else arguments do not know how they are displayed.
    program.build();
    let Some(ContextValue::String(refused)) = refusal.get(ContextKind::InvalidArg) else {
        return;
    };
    let arg = program
        .get_arguments()
        .find(|arg| arg.to_string() == *refused);
    let Some((arg, variable)) = arg.and_then(|arg| Some((arg, arg.get_env()?))) else {
        return;
    };
    let flag = format!("--{}", arg.get_long().unwrap_or_default());
    let is_flag = |given: &OsString| {
        let given = given.to_string_lossy();
        given.split('=').next() == Some(flag.as_str())
    };
    if args.iter().any(is_flag) {
        return;
    }
    let (variable, secret) = (
        variable.to_string_lossy().into_owned(),
        arg.is_hide_env_values_set(),
    );
    refusal.insert(ContextKind::InvalidArg, ContextValue::String(variable));
    match refusal.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) if secret && !value.is_empty() => {
            let hidden = ContextValue::String("(hidden)".to_owned());
            refusal.insert(ContextKind::InvalidValue, hidden);
        }
        _ => {}
    }
}

/// What to say of a path that is empty: of that, clap does not say what it expects.
fn of_empty_path(
    refusal: &clap::Error,
    mut program: Command,
    args: &[OsString],
) -> Option<clap::Error> {
    let empty = empty_value(refusal, args)?.to_owned();
    program.build();
    let arg = program
        .get_arguments()
        .find(|arg| arg.to_string() == empty)?;
    if !arg.get_possible_values().is_empty() {
        return None;
    }
    let names = arg.get_value_names().unwrap_or_default();
    let of_what = if names.iter().any(|name| name == "DIR") {
        "directory"
    } else {
        "file"
    };
    let text = format!(
        "invalid value '(empty)' for '{empty}': expected the path of a {of_what}, got none"
    );
    Some(program.error(ErrorKind::ValueValidation, text))
}

/// Says that a value is empty: of a flag with names for values clap says that there is none.
fn name_emptiness(refusal: &mut clap::Error, args: &[OsString]) {
    if empty_value(refusal, args).is_some() {
        let value = ContextValue::String("(empty)".to_owned());
        refusal.insert(ContextKind::InvalidValue, value);
    }
}

/// The flag with its value's name, of a refusal for a value that was given and is empty.
fn empty_value<'a>(refusal: &'a clap::Error, args: &[OsString]) -> Option<&'a str> {
    let (Some(ContextValue::String(arg)), Some(ContextValue::String(value))) = (
        refusal.get(ContextKind::InvalidArg),
        refusal.get(ContextKind::InvalidValue),
    ) else {
        return None;
    };
    // A parser of ours says itself what it expects.
    if refusal.kind() != ErrorKind::InvalidValue {
        return None;
    }
    let flag = arg.split(' ').next().unwrap_or_default();
    let empty = format!("{flag}=");
    let mut given = args
        .iter()
        .skip_while(|given| *given != flag && **given != *empty);
    let is_given = given.any(|given| given.is_empty() || **given == *empty);
    (value.is_empty() && is_given).then_some(arg)
}

/// What `--help` says of how a program ends.
pub(crate) const STATUS: &str = "\
The exit status is 0 where all went well, 2 where the command line is wrong by itself, and 1 where
something else fails: the model, a file, the memory or the device cannot do what is asked for. Where the
reader of a pipe closes it, as head does, a program ends at once and without a word, with status 141.";

/// The flags that an error is due to, in front of its cause or as all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blame {
    text: String,
    misuse: bool,
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Blame {}

impl Blame {
    /// A command line that is wrong whatever the model, the files and the machine.
    pub(crate) fn misuse(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            misuse: true,
        }
    }

    /// A flag that would do elsewhere.
    pub(crate) fn here(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            misuse: false,
        }
    }

    /// The exit status of a program that ends with an error: that of clap's refusals for a command line
    /// that is wrong by itself.
    pub(crate) fn status(error: &anyhow::Error) -> u8 {
        match error.downcast_ref::<Self>() {
            Some(blame) if blame.misuse => 2,
            _ => 1,
        }
    }
}

/// Leaves what can be read of the argument or the value that a refusal is about.
fn quote(refusal: &mut clap::Error, stray: bool, args: &[OsString]) {
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidValue] {
        let Some(ContextValue::String(given)) = refusal.get(kind) else {
            continue;
        };
        let quoted = as_given(given, args).unwrap_or_else(|| io::beginning(given));
        if quoted != *given && !stray {
            // Clap's own tip has the argument in it, too.
            refusal.insert(ContextKind::Suggested, ContextValue::None);
        }
        refusal.insert(kind, ContextValue::String(quoted));
    }
}

/// An argument, or a value behind its flag, that is no text: clap has U+FFFD for what it cannot show.
fn as_given(lossy: &str, args: &[OsString]) -> Option<String> {
    if !lossy.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    let given = args.iter().find_map(|arg| {
        let bytes = arg.as_encoded_bytes();
        let value = bytes.splitn(2, |byte| *byte == b'=').nth(1);
        [Some(bytes), value]
            .into_iter()
            .flatten()
            .find(|bytes| String::from_utf8_lossy(bytes) == lossy)
    })?;
    Some(io::cut(ShownBytes(given).to_string()))
}

/// What a refused command line gets to read. The arguments that clap repeats can hold what moves the
/// cursor of a terminal or turns the rest around, so that its own colours are left out.
pub fn message(refusal: &clap::Error) -> String {
    io::escaped(&refusal.to_string(), |c| c == '\n')
}

/// What a stray argument may have been meant for: how several values of a flag are separated.
fn tip(program: &Command) -> String {
    let flags = |of: fn(&Arg) -> bool| {
        let named = program.get_arguments().filter(|arg| of(arg));
        let named = named.filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
        named.collect::<Vec<_>>().join(", ")
    };
    let by_commas = flags(|arg| arg.get_value_delimiter() == Some(','));
    let by_blanks = flags(|arg| arg.get_num_args().is_some_and(|args| args.max_values() > 1));
    let several = [
        (by_commas, "by commas, without blanks"),
        (by_blanks, "by blanks"),
    ];
    let several = several.into_iter().filter(|(flags, _)| !flags.is_empty());
    let several =
        several.map(|(flags, how)| format!("several values of {flags} are separated {how}"));
    let first = "every argument belongs to a flag; a value with blanks stands in quotes".to_owned();
    let tips: Vec<String> = std::iter::once(first).chain(several).collect();
    tips.join("; ")
}

/// A flag's value from its text. Of a value that is no UTF-8 clap's own message does not say whose it
/// is.
pub(crate) fn text<T, E>(
    parse: impl Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
    E: std::fmt::Display + 'static,
{
    OsStringValueParser::new().try_map(move |value: OsString| {
        let text = io::utf8(value.into_encoded_bytes()).map_err(|error| error.to_string())?;
        parse(&text).map_err(|error| error.to_string())
    })
}

/// A type of whole numbers that a flag takes, with the largest.
pub(crate) trait Whole: FromStr<Err = ParseIntError> {
    const MOST: u64;
}

impl Whole for u16 {
    const MOST: u64 = u16::MAX as u64;
}

impl Whole for u32 {
    const MOST: u64 = u32::MAX as u64;
}

impl Whole for u64 {
    const MOST: u64 = u64::MAX;
}

impl Whole for usize {
    const MOST: u64 = usize::MAX as u64;
}

impl Whole for NonZeroU32 {
    const MOST: u64 = u32::MAX as u64;
}

impl Whole for NonZeroUsize {
    const MOST: u64 = usize::MAX as u64;
}

/// Parses the whole number of a flag. The standard library's message for one that is none, "invalid
/// digit found in string", does not say what would do.
pub(crate) fn whole<N: Whole>(text: &str) -> Result<N, String> {
    from(0, text)
}

/// The same for a `NonZero` number.
pub(crate) fn counting<N: Whole>(text: &str) -> Result<N, String> {
    from(1, text)
}

/// The same for a number that may not be zero.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    counting(text).map(NonZeroUsize::get)
}

/// One of several such numbers.
pub(crate) fn one_of_positive(text: &str) -> Result<usize, String> {
    let separated = |refusal| format!("{refusal}; several are separated by commas, without blanks");
    positive(text).map_err(separated)
}

/// One of several policies.
pub(crate) fn one_of_policies(text: &str) -> Result<ReplayPolicy, String> {
    let policy = text.parse::<ReplayPolicy>();
    policy.map_err(|refusal| format!("{refusal}; several are separated by commas, without blanks"))
}

/// `least` is the smallest number of the type.
fn from<N: Whole>(least: u8, text: &str) -> Result<N, String> {
    text.parse().map_err(|error: N::Err| match error.kind() {
        IntErrorKind::PosOverflow => format!("expected at most {}", N::MOST),
        _ => format!("expected a whole number, {least} or more"),
    })
}
