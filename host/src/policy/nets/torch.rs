//! PyTorch checkpoints: a zip archive with a pickle that describes tensors and one entry for the
//! bytes of each storage. Nothing of the pickle is executed, see [`super::pickle`].

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Number, Value as Json};
use zip::{CompressionMethod, ZipArchive};

use super::file::{Kind, Place, Tensor};
use super::pickle::{self, Pickle, Ref, Value};

/// Larger pickles are refused; one of a checkpoint has some kilobytes.
const MAX_PICKLE: u64 = 64 << 20;
/// Most bytes of the metadata as JSON, about; each shared value counts as often as it is used.
const MOST_METADATA: usize = 4 << 20;
/// Deepest nesting of the metadata.
const DEEPEST_METADATA: usize = 32;
/// A pickle may name one value as often as it likes, and each use is a copy here: most tensors, dimensions of one,
/// bytes of its name, and bytes of a storage's.
const MOST_TENSORS: usize = 1 << 16;
const MOST_DIMENSIONS: usize = 16;
const LONGEST_NAME: usize = 1024;
const LONGEST_KEY: usize = 64;
/// The entry of a checkpoint that nests its tensors.
const STATE_DICT: &str = "state_dict";

/// The storages of an open checkpoint.
pub(super) struct Checkpoint {
    archive: ZipArchive<File>,
    /// Directory within the archive, with a slash at its end.
    prefix: String,
    /// The storage read last: tensors of one storage tend to be read together.
    last: Option<(String, Vec<u8>)>,
}

/// What [`Checkpoint::open`] finds.
type Opened = (Checkpoint, BTreeMap<String, Tensor>, Map<String, Json>);

impl Checkpoint {
    /// Open a checkpoint: its storages, its tensors, and everything else in it.
    pub(super) fn open(path: &Path) -> Result<Opened, String> {
        let file = File::open(path).map_err(|e| format!("cannot be read: {e}"))?;
        let mut archive = ZipArchive::new(file).map_err(|e| {
            format!("is no zip archive ({e}); save it with torch.save of PyTorch 1.6 or later, or as safetensors")
        })?;
        let is_pickle = |name: &str| name.rsplit('/').next() == Some("data.pkl");
        let mut pickles = archive.file_names().filter_map(Result::ok).filter(|name| is_pickle(name));
        let name = pickles.next().ok_or("has no data.pkl: it is no checkpoint of torch.save")?.into_owned();
        if pickles.next().is_some() {
            return Err("has several entries data.pkl: it is no checkpoint of torch.save".into());
        }
        drop(pickles);
        let prefix = name.strip_suffix("data.pkl").unwrap_or_default().to_owned();
        let bytes = read_entry(&mut archive, &name, MAX_PICKLE)?;
        let pickle = pickle::read(&bytes).map_err(|e| format!("has a damaged pickle: {e}"))?;
        let order = format!("{prefix}byteorder");
        if archive.index_for_name(&order).is_some() && read_entry(&mut archive, &order, 16)? != b"little" {
            return Err("stores big-endian numbers; save it on a little-endian machine".into());
        }
        let Value::Dict(entries) = pickle.get(pickle.root) else {
            return Err("holds no dictionary; save a state_dict, or a dictionary with one under `state_dict`".into());
        };
        let nested = pickle.entry(pickle.root, STATE_DICT);
        let (tensors, metadata) = match nested {
            Some(state) => (tensors(&pickle, state)?, metadata(&pickle, entries)?),
            None => (tensors(&pickle, pickle.root)?, Map::new()),
        };
        Ok((Self { archive, prefix, last: None }, tensors, metadata))
    }

    /// Bytes of a storage.
    pub(super) fn storage(&mut self, key: &str) -> Result<&[u8], String> {
        if self.last.as_ref().is_none_or(|(last, _)| last != key) {
            let name = format!("{}data/{key}", self.prefix);
            self.last = Some((key.to_owned(), read_entry(&mut self.archive, &name, u64::MAX)?));
        }
        Ok(self.last.as_ref().map_or(&[], |(_, bytes)| bytes))
    }
}

/// An uncompressed entry. torch.save compresses none, and an entry that is not compressed cannot be
/// larger than the file.
fn read_entry(archive: &mut ZipArchive<File>, name: &str, limit: u64) -> Result<Vec<u8>, String> {
    let entry = archive.by_name(name).map_err(|e| format!("its entry {name}: {e}"))?;
    if entry.compression() != CompressionMethod::Stored {
        return Err(format!("its entry {name} is compressed, which torch.save does not do"));
    }
    let mut bytes = Vec::new();
    entry.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| format!("its entry {name}: {e}"))?;
    if bytes.len() as u64 > limit {
        return Err(format!("its entry {name} is larger than {limit} bytes"));
    }
    Ok(bytes)
}

/// The tensors of a state dictionary, by name.
fn tensors(pickle: &Pickle, state: Ref) -> Result<BTreeMap<String, Tensor>, String> {
    let Value::Dict(entries) = pickle.get(state) else { return Err("its `state_dict` is no dictionary".into()) };
    if entries.len() > MOST_TENSORS {
        return Err(format!("its state dictionary has {} entries; the most is {MOST_TENSORS}", entries.len()));
    }
    let mut tensors = BTreeMap::new();
    for &(key, value) in entries {
        let Value::Text(name) = pickle.get(key) else { return Err("a tensor's name is no text".into()) };
        if name.len() > LONGEST_NAME {
            return Err(format!("a tensor's name has {} bytes; the most is {LONGEST_NAME}", name.len()));
        }
        let tensor = tensor(pickle, value).map_err(|e| format!("`{name}` of its state dictionary: {e}"))?;
        tensors.insert(name.clone(), tensor);
    }
    Ok(tensors)
}

/// A tensor as `torch._utils` would rebuild it.
fn tensor(pickle: &Pickle, at: Ref) -> Result<Tensor, String> {
    let Value::Call { function, arguments } = pickle.get(at) else { return Err("is no tensor".into()) };
    let (Value::Global(function), Value::Tuple(arguments)) = (pickle.get(*function), pickle.get(*arguments)) else {
        return Err("is no tensor".into());
    };
    match (function.as_str(), arguments.as_slice()) {
        ("torch._utils._rebuild_parameter", [data, ..]) => match pickle.get(*data) {
            // Not a parameter of a parameter: the nesting ends here.
            Value::Call { function, .. } if matches!(pickle.get(*function), Value::Global(f) if f.ends_with("_v2")) => {
                tensor(pickle, *data)
            }
            _ => Err("is a parameter without a tensor".into()),
        },
        ("torch._utils._rebuild_tensor_v2", [storage, offset, shape, strides, ..]) => {
            let (key, kind, length) = storage_of(pickle, *storage)?;
            let offset = index(pickle, *offset)?;
            let (shape, strides) = (indices(pickle, *shape)?, indices(pickle, *strides)?);
            let count = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
            let fits = count.and_then(|count| offset.checked_add(count)).is_some_and(|end| end <= length);
            if !fits {
                return Err(format!("its shape {shape:?} from number {offset} on exceeds its storage of {length}"));
            }
            if !is_row_major(&shape, &strides) {
                return Err(format!("has shape {shape:?} and strides {strides:?}; save it with .contiguous()"));
            }
            Ok(Tensor { shape, kind, place: Place::Storage(key, offset) })
        }
        _ => Err(format!("is made by {function}, not a tensor as state_dict() gives it")),
    }
}

/// Key, kind and length of a storage: `('storage', torch.FloatStorage, key, device, length)`.
fn storage_of(pickle: &Pickle, at: Ref) -> Result<(String, Kind, usize), String> {
    let wrong = || "its storage is not described as torch.save does".to_owned();
    let Value::Persistent(id) = pickle.get(at) else { return Err(wrong()) };
    let Value::Tuple(id) = pickle.get(*id) else { return Err(wrong()) };
    let [_, class, key, _, length] = id.as_slice() else { return Err(wrong()) };
    let (Value::Global(class), Value::Text(key)) = (pickle.get(*class), pickle.get(*key)) else { return Err(wrong()) };
    // The key becomes part of a name in the archive.
    if key.is_empty() || key.len() > LONGEST_KEY || !key.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(wrong());
    }
    let kinds = HashMap::from([
        ("torch.HalfStorage", Kind::F16),
        ("torch.BFloat16Storage", Kind::Bf16),
        ("torch.FloatStorage", Kind::F32),
        ("torch.DoubleStorage", Kind::F64),
    ]);
    Ok((key.clone(), kinds.get(class.as_str()).copied().unwrap_or(Kind::Other), index(pickle, *length)?))
}

fn index(pickle: &Pickle, at: Ref) -> Result<usize, String> {
    match pickle.get(at) {
        Value::Int(n) => usize::try_from(*n).map_err(|_| format!("has {n} where a size belongs")),
        _ => Err("has something else than a whole number where a size belongs".into()),
    }
}

fn indices(pickle: &Pickle, at: Ref) -> Result<Vec<usize>, String> {
    match pickle.get(at) {
        Value::Tuple(items) if items.len() > MOST_DIMENSIONS => {
            Err(format!("has {} dimensions; the most is {MOST_DIMENSIONS}", items.len()))
        }
        Value::Tuple(items) => items.iter().map(|&item| index(pickle, item)).collect(),
        _ => Err("its shape is no tuple".into()),
    }
}

fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = 1usize;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&n, &stride)| {
            let fits = n <= 1 || stride == step;
            step = step.saturating_mul(n.max(1));
            fits
        })
}

/// All entries but the tensors, as JSON.
fn metadata(pickle: &Pickle, entries: &[(Ref, Ref)]) -> Result<Map<String, Json>, String> {
    let mut budget = MOST_METADATA;
    let rest: Vec<_> = entries
        .iter()
        .copied()
        .filter(|(key, _)| !matches!(pickle.get(*key), Value::Text(name) if name == STATE_DICT))
        .collect();
    object(pickle, &rest, 0, &mut budget)
}

fn object(
    pickle: &Pickle,
    entries: &[(Ref, Ref)],
    depth: usize,
    budget: &mut usize,
) -> Result<Map<String, Json>, String> {
    let mut map = Map::new();
    for &(key, value) in entries {
        let name = match pickle.get(key) {
            Value::Text(name) => {
                spend(budget, name.len())?;
                name.clone()
            }
            Value::Int(number) => number.to_string(),
            _ => return Err("a key of its metadata is neither a text nor a whole number".into()),
        };
        map.insert(name, json(pickle, value, depth + 1, budget)?);
    }
    Ok(map)
}

/// Pickles share values: what is small there can be endless when it is written out.
fn spend(budget: &mut usize, bytes: usize) -> Result<(), String> {
    let left = budget.checked_sub(bytes);
    *budget = left.ok_or_else(|| format!("its metadata would have more than {MOST_METADATA} bytes as JSON"))?;
    Ok(())
}

/// A value as JSON. What JSON cannot say (a tensor, a class) is the text of its name.
fn json(pickle: &Pickle, at: Ref, depth: usize, budget: &mut usize) -> Result<Json, String> {
    spend(budget, 16)?;
    if depth > DEEPEST_METADATA {
        return Err(format!("its metadata is nested deeper than {DEEPEST_METADATA}"));
    }
    Ok(match pickle.get(at) {
        Value::None => Json::Null,
        Value::Bool(value) => Json::Bool(*value),
        Value::Int(value) => Json::Number((*value).into()),
        Value::Float(value) => Number::from_f64(*value).map_or_else(|| Json::String(value.to_string()), Json::Number),
        Value::Text(text) => {
            spend(budget, text.len())?;
            Json::String(text.clone())
        }
        Value::Bytes(bytes) => {
            spend(budget, bytes.len())?;
            Json::String(String::from_utf8_lossy(bytes).into_owned())
        }
        Value::List(items) | Value::Tuple(items) => {
            Json::Array(items.iter().map(|&item| json(pickle, item, depth + 1, budget)).collect::<Result<_, _>>()?)
        }
        Value::Dict(entries) => Json::Object(object(pickle, entries, depth, budget)?),
        Value::Global(name) => {
            spend(budget, name.len())?;
            Json::String(name.clone())
        }
        Value::Persistent(_) => Json::String("a storage".into()),
        Value::Call { function, .. } => json(pickle, *function, depth + 1, budget)?,
    })
}
