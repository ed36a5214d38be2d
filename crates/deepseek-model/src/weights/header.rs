//! The header of a safetensors file, and what is wrong with one.
//!
//! The errors of the `safetensors` crate name the first offence, and for most not the tensor. The
//! header is short, so after a refusal it is looked at again here, entry by entry.

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde_json::{Map, Value};

use super::problem::Problem;
use crate::{
    config::{
        file::{FileError, POINTER},
        json::{self, Json},
    },
    memory::{Bytes, check_json_text},
};

/// Bytes of the length that a safetensors file starts with.
const LENGTH_BYTES: usize = 8;
/// Longest header in bytes, as in the `safetensors` crate. It is read into memory, the rest is not.
const MAX_HEADER: usize = 100_000_000;

/// Reads the header of `file`, whose content is `bytes`: what it lists, and where the first tensor's
/// bytes start.
pub(super) fn read(file: &str, bytes: &[u8]) -> Result<(Metadata, usize), Vec<Problem>> {
    let of_file = |reason| {
        let file = file.to_owned();
        vec![Problem::File { file, reason }]
    };
    let header = header(bytes).map_err(of_file)?;
    check_json_text(header.as_bytes()).map_err(|(bytes, shortage)| {
        let bytes = Bytes(bytes);
        of_file(format!(
            "reading its header may take {bytes} of memory, {shortage}"
        ))
    })?;
    let Json { value, repeated } = json::parse(header.as_bytes()).map_err(|stopped| {
        of_file(match stopped.key.as_str() {
            "" => format!("invalid JSON in header: {}", stopped.source),
            // Keys can be long, and what is long is cut at its end.
            key => format!("invalid JSON in header: {}, in {key}", stopped.source),
        })
    })?;
    if !repeated.is_empty() {
        // Of two entries the crate would take either.
        let problem = |json::Repeated {
                           outer,
                           inner,
                           violation,
                       }: json::Repeated| {
            let key = if inner.is_empty() {
                inner
            } else {
                inner + ": "
            };
            let (expected, found) = (violation.expected, violation.found);
            let reason = format!("{key}expected {expected}, found {found}");
            entry_problem(&outer, file, reason)
        };
        return Err(repeated.into_iter().map(problem).collect());
    }
    let metadata: Metadata = serde_json::from_value(value).map_err(|error| {
        let again: Map<String, Value> = serde_json::from_str(header).unwrap_or_default();
        let entries = bad_entries(file, &again);
        if entries.is_empty() {
            of_file(format!("invalid header: {error}"))
        } else {
            entries
        }
    })?;
    let start = LENGTH_BYTES + header.len();
    check_len(bytes.len(), start, metadata.data_len()).map_err(of_file)?;
    Ok((metadata, start))
}

/// The text of the header, or why there is none.
fn header(bytes: &[u8]) -> Result<&str, String> {
    let len = bytes.len();
    if bytes.starts_with(POINTER) {
        return Err(FileError::Pointer.to_string());
    }
    if bytes.is_empty() {
        return Err("the file is empty".to_owned());
    }
    let Some((announced, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!(
            "{len} bytes are too few for a safetensors file; is it truncated?"
        ));
    };
    let announced = u64::from_le_bytes(*announced);
    let header = usize::try_from(announced)
        .ok()
        .filter(|&n| n <= MAX_HEADER)
        .and_then(|n| rest.get(..n));
    let header = header.ok_or_else(|| {
        format!(
            "no safetensors file, or truncated: announces a header of {announced} bytes, has {len} \
             in all"
        )
    })?;
    std::str::from_utf8(header).map_err(|error| format!("invalid UTF-8 in header: {error}"))
}

/// The tensors end where the file does. Their ends are numbers out of the file: any at all.
fn check_len(len: usize, start: usize, data: usize) -> Result<(), String> {
    match start.checked_add(data) {
        Some(expected) if expected == len => Ok(()),
        Some(expected) if expected > len => Err(format!(
            "truncated: the header lists {expected} bytes, the file has {len}"
        )),
        Some(expected) => Err(format!(
            "the header lists {expected} bytes, the file has {len}"
        )),
        None => Err(format!(
            "the header lists more bytes than can be addressed, the file has {len}"
        )),
    }
}

/// Every entry that is wrong in itself, or does not follow the one before it.
fn bad_entries(file: &str, header: &Map<String, Value>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut spans = Vec::new();
    for (tensor, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        match read_entry(entry) {
            Ok(span) => spans.push((span, tensor)),
            Err(reason) => problems.push(entry_problem(tensor, file, reason)),
        }
    }
    if problems.is_empty() {
        // The format wants the tensors to follow each other without gap or overlap.
        spans.sort_unstable();
        let (mut end, mut before) = (0, None);
        for ((from, to), tensor) in spans {
            // Either of the two may be the one that is wrong.
            let reason = match before {
                None => format!("starts at byte {from}, expected 0 of the first tensor"),
                Some(before) => {
                    format!("starts at byte {from}, expected {end}, the end of {before}")
                }
            };
            if from != end {
                problems.push(entry_problem(tensor, file, reason));
            }
            (end, before) = (to, Some(tensor));
        }
    }
    problems
}

fn entry_problem(tensor: &str, file: &str, reason: String) -> Problem {
    Problem::HeaderEntry {
        tensor: tensor.into(),
        file: file.into(),
        reason,
    }
}

/// The span of an entry's bytes, or why the entry is bad.
fn read_entry(entry: &Value) -> Result<(usize, usize), String> {
    let dtype = &entry["dtype"];
    if dtype.is_string() && serde_json::from_value::<Dtype>(dtype.clone()).is_err() {
        return Err(format!("unknown dtype {dtype}"));
    }
    let info: TensorInfo = serde_json::from_value(entry.clone()).map_err(|e| e.to_string())?;
    let (from, to) = info.data_offsets;
    let span = to.checked_sub(from);
    let span = span.ok_or_else(|| format!("ends at byte {to}, before its start at {from}"))?;

    let (dtype, shape) = (info.dtype, &info.shape);
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &n| bits.checked_mul(n))
        .ok_or_else(|| format!("{dtype} of shape {shape:?} exceeds any memory"))?;
    if bits % 8 != 0 {
        return Err(format!(
            "{dtype} of shape {shape:?} does not fill whole bytes"
        ));
    }
    if bits / 8 != span {
        let bytes = bits / 8;
        return Err(format!(
            "{dtype} of shape {shape:?} takes {bytes} bytes, not {span}"
        ));
    }
    Ok((from, to))
}
