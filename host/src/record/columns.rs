//! Evaluations of one model as columns, and columns as the bytes of a safetensors file. Pure.

use std::borrow::Cow;

use half::f16;
use safetensors::tensor::{Dtype, View};

use crate::request::{SignalName, TokenId};

/// A column that every file has.
pub struct FixedColumn {
    pub name: &'static str,
    pub dtype: Dtype,
    pub meaning: &'static str,
}

const fn fixed(name: &'static str, dtype: Dtype, meaning: &'static str) -> FixedColumn {
    FixedColumn { name, dtype, meaning }
}

/// One number a row, in the order of [`Row::fields`].
pub const FIXED: [FixedColumn; 16] = [
    fixed("request", Dtype::I64, "id of the request, unique in the run"),
    fixed("position", Dtype::I32, "index of the candidate among the generated tokens"),
    fixed("candidate", Dtype::I32, "token id that the model sampled"),
    fixed("draft", Dtype::I32, "token id of the provisional token being verified here; -1: none"),
    fixed(
        "decision",
        Dtype::U8,
        "what the policy answered: 0 stay, 1 draft, 2 to, 3 accept; 4: nobody was asked; 255: no known answer",
    ),
    fixed("decision_model", Dtype::I32, "the model that takes over, an index into `models`; -1: none"),
    fixed("replacement", Dtype::I32, "token id that the policy put in the candidate's place; -1: none"),
    fixed("logprob", Dtype::F32, "natural logarithm of the candidate's probability"),
    fixed("entropy", Dtype::F32, "entropy of the next-token distribution, nats"),
    fixed("entropy_norm", Dtype::F32, "entropy by ln of the number of tokens that can be sampled, 0 to 1"),
    fixed("top1_prob", Dtype::F32, "probability of the best token"),
    fixed("margin", Dtype::F32, "probability of the best token less that of the second"),
    fixed("logsumexp", Dtype::F32, "natural logarithm of the sum of the exponentials of the logits"),
    fixed("candidate_prob", Dtype::F32, "probability of the candidate"),
    fixed("time_us", Dtype::I64, "when it was decided, microseconds since the start of the run"),
    fixed("route", Dtype::I32, "the request's route, an index into `routes`"),
];

/// Columns with several numbers a row.
pub const HIDDEN: FixedColumn = fixed("hidden", Dtype::F16, "last hidden state after the final norm");
pub const TOPK_VALUES: FixedColumn = fixed("topk_values", Dtype::F32, "largest raw logits, descending");
pub const TOPK_IDS: FixedColumn = fixed("topk_ids", Dtype::I32, "token ids of `topk_values`; -1: no such token");

/// Numbers a row of the wide columns; 0 for columns that are not written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub hidden: usize,
    pub top_k: usize,
}

/// One evaluation. The wide fields are as wide as the [`Shape`].
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub request: u64,
    pub position: u32,
    pub candidate: TokenId,
    pub draft: Option<TokenId>,
    pub decision: u8,
    pub decision_model: Option<u32>,
    pub replacement: Option<TokenId>,
    pub logprob: f32,
    /// In the order of [`FIXED`], from `entropy` on.
    pub scalars: [f32; 6],
    pub time_us: u64,
    pub route: u32,
    pub hidden: &'a [f32],
    pub topk_values: &'a [f32],
    pub topk_ids: &'a [TokenId],
    /// Signals that only some routes have: place among the names, and value.
    pub own: &'a [(usize, f32)],
}

struct Column {
    name: SignalName,
    dtype: Dtype,
    /// `None` for one number a row.
    width: Option<usize>,
    data: Vec<u8>,
}

/// Evaluations of one model.
pub struct Columns {
    rows: usize,
    fixed: Vec<Column>,
    /// By place among the model's names of own signals, which are only ever added to.
    own: Vec<Column>,
}

/// A token id as stored: `NO_TOKEN` is -1.
fn stored(id: TokenId) -> i32 {
    i32::try_from(id).unwrap_or(-1)
}

fn stored_option(id: Option<u32>) -> i32 {
    id.map_or(-1, stored)
}

impl Columns {
    /// No rows, with room for `rows`.
    pub fn new(shape: Shape, rows: usize) -> Self {
        let wide = [(HIDDEN, shape.hidden), (TOPK_VALUES, shape.top_k), (TOPK_IDS, shape.top_k)];
        let fixed = FIXED.map(|column| (column, None)).into_iter();
        let columns =
            fixed.chain(wide.into_iter().filter(|(_, w)| *w > 0).map(|(column, width)| (column, Some(width))));
        let column = |(FixedColumn { name, dtype, .. }, width): (FixedColumn, Option<usize>)| {
            let data = Vec::with_capacity(rows * width.unwrap_or(1) * dtype.bitsize() / 8);
            Column { name: name.into(), dtype, width, data }
        };
        Self { rows: 0, fixed: columns.map(column).collect(), own: Vec::new() }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Names of the own signals.
    pub fn own_names(&self) -> impl Iterator<Item = &str> {
        self.own.iter().map(|column| &*column.name)
    }

    /// Bytes of all values.
    pub fn data_bytes(&self) -> usize {
        self.fixed.iter().chain(&self.own).map(|column| column.data.len()).sum()
    }

    /// Add a row. `names` are the names of the places in `row.own`.
    pub fn push(&mut self, row: &Row<'_>, names: &[SignalName]) {
        let [entropy, entropy_norm, top1_prob, margin, logsumexp, candidate_prob] = row.scalars;
        let fields: [&[u8]; FIXED.len()] = [
            &(row.request as i64).to_le_bytes(),
            &(row.position as i32).to_le_bytes(),
            &stored(row.candidate).to_le_bytes(),
            &stored_option(row.draft).to_le_bytes(),
            &[row.decision],
            &stored_option(row.decision_model).to_le_bytes(),
            &stored_option(row.replacement).to_le_bytes(),
            &row.logprob.to_le_bytes(),
            &entropy.to_le_bytes(),
            &entropy_norm.to_le_bytes(),
            &top1_prob.to_le_bytes(),
            &margin.to_le_bytes(),
            &logsumexp.to_le_bytes(),
            &candidate_prob.to_le_bytes(),
            &(row.time_us as i64).to_le_bytes(),
            &(row.route as i32).to_le_bytes(),
        ];
        let (scalars, wide) = self.fixed.split_at_mut(FIXED.len());
        scalars.iter_mut().zip(fields).for_each(|(column, bytes)| column.data.extend_from_slice(bytes));
        for column in wide {
            match &*column.name {
                "hidden" => {
                    column.data.extend(row.hidden.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
                }
                "topk_values" => column.data.extend(row.topk_values.iter().flat_map(|x| x.to_le_bytes())),
                _ => column.data.extend(row.topk_ids.iter().flat_map(|&id| stored(id).to_le_bytes())),
            }
        }
        for &(place, value) in row.own {
            self.own_up_to(place + 1, |at| names[at].clone());
            let column = &mut self.own[place];
            // A name that comes twice in one route keeps the later value.
            column.data.truncate(self.rows * size_of::<f32>());
            column.data.extend_from_slice(&value.to_le_bytes());
        }
        self.rows += 1;
        self.pad();
    }

    /// Add the rows of `more`, which has the same shape and the same model's names.
    pub fn append(&mut self, more: &Self) {
        self.own_up_to(more.own.len(), |at| more.own[at].name.clone());
        for (column, more) in self.fixed.iter_mut().zip(&more.fixed).chain(self.own.iter_mut().zip(&more.own)) {
            column.data.extend_from_slice(&more.data);
        }
        self.rows += more.rows;
        self.pad();
    }

    /// Make own columns up to `count`, with NaN in all rows so far.
    fn own_up_to(&mut self, count: usize, name: impl Fn(usize) -> SignalName) {
        for at in self.own.len()..count {
            let data = f32::NAN.to_le_bytes().repeat(self.rows);
            self.own.push(Column { name: name(at), dtype: Dtype::F32, width: None, data });
        }
    }

    /// Own columns without a value in the last rows get NaN there.
    fn pad(&mut self) {
        for column in &mut self.own {
            let missing = self.rows - column.data.len() / size_of::<f32>();
            column.data.extend(f32::NAN.to_le_bytes().repeat(missing));
        }
    }

    /// Most bytes of a file with these rows and those of `more`; 0 without any.
    pub fn file_bound(&self, more: Option<&Self>) -> u64 {
        let (more_rows, more_own) = more.map_or((0, &[][..]), |more| (more.rows, &more.own));
        let rows = self.rows + more_rows;
        if rows == 0 {
            return 0;
        }
        let own = if self.own.len() > more_own.len() { &self.own } else { more_own };
        // A name has at most 6 bytes a byte in JSON; the rest of its entry is shorter than 160.
        let header: usize = self.fixed.iter().chain(own).map(|c| 6 * c.name.len() + 160).sum();
        let fixed = self.fixed.iter().chain(more.into_iter().flat_map(|more| &more.fixed));
        let data: usize = fixed.map(|column| column.data.len()).sum();
        (header + data + own.len() * rows * size_of::<f32>()) as u64
    }

    /// The bytes of a safetensors file with one tensor a column.
    pub fn to_safetensors(&self) -> Result<Vec<u8>, String> {
        let columns = self.fixed.iter().chain(&self.own);
        let tensors = columns.map(|column| {
            let shape = [Some(self.rows), column.width].into_iter().flatten().collect();
            (&*column.name, Tensor { column, shape })
        });
        safetensors::serialize(tensors, None).map_err(|e| e.to_string())
    }
}

struct Tensor<'a> {
    column: &'a Column,
    shape: Vec<usize>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.column.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.column.data)
    }
    fn data_len(&self) -> usize {
        self.column.data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    const NAMES: [SignalName; 2] = [Cow::Borrowed("net_\"x\""), Cow::Borrowed("token_logit_7")];

    fn row(request: u64, own: &[(usize, f32)]) -> Row<'_> {
        Row {
            request,
            position: 3,
            candidate: 9,
            draft: None,
            decision: 2,
            decision_model: Some(1),
            replacement: Some(4),
            logprob: -0.5,
            scalars: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            time_us: 8,
            route: 0,
            hidden: &[0.5, -2.0],
            topk_values: &[7.0, f32::NEG_INFINITY, 1.0],
            topk_ids: &[5, u32::MAX, 6],
            own,
        }
    }

    fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn ints(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn rows_come_back() {
        let shape = Shape { hidden: 2, top_k: 3 };
        let mut columns = Columns::new(shape, 0);
        columns.push(&row(1 << 40, &[]), &NAMES);
        let mut more = Columns::new(shape, 2);
        more.push(&row(2, &[(1, 0.25)]), &NAMES);
        more.push(&row(3, &[(0, 8.0), (0, 0.75)]), &NAMES);
        let bound = columns.file_bound(Some(&more));
        columns.append(&more);
        columns.append(&Columns::new(shape, 0));
        assert_eq!((columns.rows(), columns.own_names().collect::<Vec<_>>()), (3, vec!["net_\"x\"", "token_logit_7"]));
        let bytes = columns.to_safetensors().unwrap();
        assert!(bytes.len() as u64 <= bound, "{} > {bound}", bytes.len());
        assert!(columns.data_bytes() < bytes.len());
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), FIXED.len() + 3 + 2);
        let ids = file.tensor("request").unwrap();
        assert_eq!((ids.dtype(), ids.shape()), (Dtype::I64, &[3][..]));
        assert_eq!(ids.data()[..8], (1i64 << 40).to_le_bytes());
        assert_eq!(file.tensor("decision").unwrap().data(), [2, 2, 2]);
        assert_eq!((ints(&file, "draft"), ints(&file, "replacement")), (vec![-1; 3], vec![4; 3]));
        assert_eq!((ints(&file, "candidate"), ints(&file, "decision_model")), (vec![9; 3], vec![1; 3]));
        assert_eq!((floats(&file, "entropy"), floats(&file, "candidate_prob")), (vec![1.0; 3], vec![6.0; 3]));
        let hidden = file.tensor("hidden").unwrap();
        assert_eq!((hidden.dtype(), hidden.shape()), (Dtype::F16, &[3, 2][..]));
        let halves: Vec<f16> = hidden.data().chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(halves[..2], [f16::from_f32(0.5), f16::from_f32(-2.0)]);
        assert_eq!(ints(&file, "topk_ids")[..3], [5, -1, 6]);
        assert_eq!(floats(&file, "topk_values")[3..6], [7.0, f32::NEG_INFINITY, 1.0]);
        let (net, logit) = (floats(&file, "net_\"x\""), floats(&file, "token_logit_7"));
        assert!(net[0].is_nan() && net[1].is_nan() && net[2] == 0.75, "{net:?}");
        assert!(logit[0].is_nan() && logit[1] == 0.25 && logit[2].is_nan(), "{logit:?}");
    }

    #[test]
    fn what_is_not_wanted_has_no_column() {
        let mut columns = Columns::new(Shape::default(), 1);
        columns.push(&Row { hidden: &[], topk_values: &[], topk_ids: &[], ..row(1, &[]) }, &NAMES);
        let bytes = columns.to_safetensors().unwrap();
        assert!(bytes.len() as u64 <= columns.file_bound(None));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        let mut expected = FIXED.map(|column| column.name);
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}
