//! The block of a module's memory in which the host writes what a policy sees and reads what it decided.
//! All numbers are little-endian; every column has room for [`ROWS`] values.

use tokenrouter_plugin_api::{Decision, Handoff, ModelIndex, NO_MODEL, RouteBatch, SignalSet};

use super::manifest::SIGNALS;

/// Most rows of one call.
pub const ROWS: usize = 256;
/// Most settings.
pub const MAX_SETTINGS: usize = 32;
/// Bytes of a column.
const COLUMN: usize = 4 * ROWS;

/// Where things are, in bytes from the start of the block.
const MODEL: usize = 0;
const MODELS: usize = 4;
const ENTRY: usize = 8;
const SETTINGS: usize = 0x100;
const TO: usize = 0x400;
const LEAVE: usize = TO + COLUMN;
const SIGNAL_COLUMNS: usize = LEAVE + COLUMN;
const SLOT: usize = SIGNAL_COLUMNS + SIGNALS.len() * COLUMN;
const POSITION: usize = SLOT + COLUMN;
const REMAINING: usize = POSITION + COLUMN;
const CAME_FROM: usize = REMAINING + COLUMN;
/// Bytes of the block of a module without nets; their columns come behind it.
pub const BLOCK: usize = CAME_FROM + COLUMN;
/// Most nets.
pub const MAX_NETS: usize = 4;

/// Bytes of the block of a module with so many nets.
pub const fn block_bytes(nets: usize) -> usize {
    BLOCK + nets * COLUMN
}

const _: () = assert!(SETTINGS + 8 * MAX_SETTINGS <= TO && BLOCK == 0x3400);

/// In the column `leave`: the candidate is dropped. The other bits are the budget, 0 for none.
const DROP: u32 = 1 << 31;

/// How the module counts the models of the route.
#[derive(Clone, Debug)]
pub struct Numbering {
    /// What each number in the column `to` means.
    decisions: Vec<Decision>,
    /// For each model of the route the module's number.
    numbers: Vec<u32>,
}

impl Numbering {
    /// `order`: the route's models in the module's order.
    pub fn new(order: &[ModelIndex]) -> Self {
        let mut numbers = vec![NO_MODEL; order.iter().max().map_or(0, |&last| last as usize + 1)];
        for (number, &model) in (0..).zip(order) {
            numbers[model as usize] = number;
        }
        let decisions = [Decision::STAY].into_iter().chain(order.iter().copied().map(Decision::to)).collect();
        Self { decisions, numbers }
    }

    /// The module's number of a model of the route.
    pub fn number(&self, model: ModelIndex) -> u32 {
        self.numbers.get(model as usize).copied().unwrap_or(NO_MODEL)
    }

    pub fn models(&self) -> u32 {
        self.decisions.len() as u32 - 1
    }
}

/// What an instance is told before its first call.
#[derive(Clone, Debug)]
pub struct Seat {
    pub model: ModelIndex,
    pub entry: ModelIndex,
    pub numbering: Numbering,
    pub settings: Vec<f64>,
    /// For each of the module's nets its place among the scores of a row at this model, if it is computed here.
    pub nets: Vec<Option<usize>>,
}

/// How a row is handed over: a value of the column `leave`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leave(u32);

impl Leave {
    pub fn handoff(self) -> Handoff {
        let mut handoff = if self.0 & DROP == 0 { Handoff::default() } else { Handoff::drop_candidate() };
        handoff.budget = Some(self.0 & !DROP).filter(|&budget| budget > 0);
        handoff
    }
}

/// What becomes of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    pub decision: Decision,
    /// Only of a row that is handed over.
    pub leave: Option<Leave>,
}

impl Answer {
    pub const STAY: Self = Self { decision: Decision::STAY, leave: None };
}

/// What a module wrote that has no meaning.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    #[error(
        "row {row} goes to {to} - 1, the route has models 0 to {last}; write 0 to stay, or a model's number plus 1"
    )]
    To { row: usize, to: u32, last: u32 },
}

/// The host itself lacks something: nothing the module did.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server gave no column `{0}` for these rows")]
pub struct MissingColumn(&'static str);

fn words(block: &mut [u8], at: usize, values: impl Iterator<Item = u32>) {
    for (bytes, value) in block[at..].as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
}

/// Write what does not change from call to call. `block` has [`BLOCK`] bytes, here and below.
pub fn write_seat(block: &mut [u8], seat: &Seat) {
    let Seat { model, entry, numbering, settings, .. } = seat;
    words(block, MODEL, [numbering.number(*model)].into_iter());
    words(block, MODELS, [numbering.models()].into_iter());
    words(block, ENTRY, [numbering.number(*entry)].into_iter());
    for (bytes, value) in block[SETTINGS..TO].as_chunks_mut::<8>().0.iter_mut().zip(settings) {
        *bytes = value.to_le_bytes();
    }
}

/// Write the scores of `nets` for the rows that begin at `first`. A net that is computed at another model has none here.
pub fn write_nets(
    block: &mut [u8],
    batch: &RouteBatch<'_>,
    first: usize,
    rows: usize,
    nets: &[Option<usize>],
) -> Result<(), MissingColumn> {
    let (scores, width) = (batch.signals.net_scores, batch.signals.net_width as usize);
    let here = nets.iter().flatten().count();
    // Each score is one number, or the places would not be those of `nets`.
    if here > 0 && (width != here || scores.len() != batch.len() * width) {
        return Err(MissingColumn("nets"));
    }
    for (net, place) in nets.iter().enumerate() {
        let value = |row: usize| place.map_or(f32::NAN, |place| scores[row * width + place]);
        let bits = (first..first + rows).map(value).map(canonical);
        words(block, block_bytes(net), bits);
    }
    Ok(())
}

/// One NaN for all: its other bits must not become something that decisions depend on.
fn canonical(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

/// Write the rows of `batch` that begin at `first`, at most [`ROWS`] of them, and clear their answers.
pub fn write_rows(
    block: &mut [u8],
    batch: &RouteBatch<'_>,
    first: usize,
    signals: SignalSet,
    numbering: &Numbering,
) -> Result<usize, MissingColumn> {
    let rows = (batch.len() - first).min(ROWS);
    fn part<'a, T>(column: &'a [T], first: usize, rows: usize, name: &'static str) -> Result<&'a [T], MissingColumn> {
        column.get(first..first + rows).ok_or(MissingColumn(name))
    }
    for (index, (name, signal)) in SIGNALS.into_iter().enumerate() {
        if !signals.contains(signal) {
            continue;
        }
        let columns = &batch.signals;
        let column = match index {
            0 => columns.entropy,
            1 => columns.entropy_norm,
            2 => columns.top1_prob,
            3 => columns.margin,
            4 => columns.logsumexp,
            _ => columns.candidate_prob,
        };
        let values = part(column, first, rows, name)?.iter().copied();
        words(block, SIGNAL_COLUMNS + index * COLUMN, values.map(canonical));
    }
    for (at, column, name) in [
        (SLOT, batch.slots, "slots"),
        (POSITION, batch.positions, "positions"),
        (REMAINING, batch.remaining, "remaining"),
    ] {
        words(block, at, part(column, first, rows, name)?.iter().copied());
    }
    let came_from = part(batch.last_models, first, rows, "last_models")?;
    words(block, CAME_FROM, came_from.iter().map(|&model| numbering.number(model)));
    block[TO..][..4 * rows].fill(0);
    block[LEAVE..][..4 * rows].fill(0);
    Ok(rows)
}

/// Read the answers for the first rows, as many as there is room for in `answers`.
pub fn read_answers(block: &[u8], numbering: &Numbering, answers: &mut [Answer]) -> Result<(), AnswerError> {
    let column = |at: usize| block[at..at + COLUMN].as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    for (row, ((answer, to), leave)) in answers.iter_mut().zip(column(TO)).zip(column(LEAVE)).enumerate() {
        let Some(&decision) = numbering.decisions.get(to as usize) else {
            return Err(AnswerError::To { row, to, last: numbering.models().saturating_sub(1) });
        };
        *answer = Answer { decision, leave: (to > 0).then_some(Leave(leave)) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_plugin_api::SignalColumns;

    fn word(block: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(block[at..at + 4].try_into().unwrap())
    }

    fn batch<'a>(words: &'a [u32], ids: &'a [u64], entropy: &'a [f32]) -> RouteBatch<'a> {
        RouteBatch {
            request_ids: ids,
            slots: words,
            positions: words,
            last_models: words,
            remaining: words,
            signals: SignalColumns { entropy, ..SignalColumns::default() },
            ..RouteBatch::default()
        }
    }

    /// The numbers of docs/policies.md.
    #[test]
    fn offsets_are_the_documented_ones() {
        assert_eq!((TO, LEAVE, SIGNAL_COLUMNS), (0x400, 0x800, 0xc00));
        assert_eq!((SLOT, POSITION, REMAINING, CAME_FROM), (0x2400, 0x2800, 0x2c00, 0x3000));
    }

    #[test]
    fn models_are_counted_in_the_modules_order() {
        let mut block = vec![0; BLOCK];
        let numbering = Numbering::new(&[2, 0]);
        write_seat(
            &mut block,
            &Seat { model: 0, entry: 2, numbering: numbering.clone(), settings: vec![0.5, -1.0], nets: vec![] },
        );
        assert_eq!([MODEL, MODELS, ENTRY].map(|at| word(&block, at)), [1, 2, 0]);
        assert_eq!(block[SETTINGS + 8..SETTINGS + 16], (-1.0f64).to_le_bytes());
        let view = batch(&[2, 0, NO_MODEL], &[0; 3], &[0.0; 3]);
        assert_eq!(write_rows(&mut block, &view, 0, SignalSet::NONE, &numbering), Ok(3));
        assert_eq!([0, 4, 8].map(|row| word(&block, CAME_FROM + row)), [0, 1, NO_MODEL]);
        words(&mut block, TO, [0, 1, 2].into_iter());
        words(&mut block, LEAVE, [9, DROP | 3, 0].into_iter());
        let mut answers = [Answer::STAY; 3];
        assert_eq!(read_answers(&block, &numbering, &mut answers), Ok(()));
        assert_eq!(answers.map(|answer| answer.decision), [Decision::STAY, Decision::to(2), Decision::to(0)]);
        assert_eq!(
            answers.map(|answer| answer.leave.map(Leave::handoff)),
            [None, Some(Handoff::drop_candidate().budget(3)), Some(Handoff::default())]
        );
    }

    #[test]
    fn scores_of_nets_come_behind_the_block() {
        let ids = [0, 1, 2];
        let scores = [0.1, 0.2, 0.3, 0.4, 0.5, f32::from_bits(0xffc1_2345)];
        let signals = SignalColumns { net_scores: &scores, net_width: 2, ..SignalColumns::default() };
        let view = RouteBatch { request_ids: &ids, signals, ..RouteBatch::default() };
        let mut block = vec![0; block_bytes(3)];
        let nets = [Some(1), None, Some(0)];
        assert_eq!(write_nets(&mut block, &view, 1, 2, &nets), Ok(()));
        let column = |block: &[u8], net: usize| [0, 4].map(|row| word(block, BLOCK + net * COLUMN + row));
        assert_eq!(column(&block, 0), [0.4f32.to_bits(), 0x7fc0_0000]);
        assert_eq!(column(&block, 1), [0x7fc0_0000; 2], "computed at another model");
        assert_eq!(column(&block, 2), [0.3f32.to_bits(), 0.5f32.to_bits()]);
        assert_eq!(write_nets(&mut block, &view, 0, 3, &[Some(0), None, None]), Err(MissingColumn("nets")));
        assert_eq!(write_nets(&mut block, &RouteBatch::default(), 0, 0, &[]), Ok(()));
    }

    #[test]
    fn models_that_do_not_exist() {
        let mut block = vec![0; BLOCK];
        let numbering = Numbering::new(&[0, 1]);
        for to in [3, 1 << 31, u32::MAX] {
            words(&mut block, TO, [0, to].into_iter());
            let read = |rows| read_answers(&block, &numbering, &mut [Answer::STAY; 2][..rows]);
            assert_eq!([read(2), read(1)], [Err(AnswerError::To { row: 1, to, last: 1 }), Ok(())]);
        }
    }

    #[test]
    fn rows_beyond_the_first_call() {
        let ids: Vec<u64> = (0..600).collect();
        let numbers: Vec<u32> = (0..600).collect();
        let mut entropy = vec![0.5f32; 600];
        entropy[599] = f32::from_bits(0xffc1_2345);
        let mut block = vec![0xff; BLOCK];
        let view = batch(&numbers, &ids, &entropy);
        let mut write = |first| write_rows(&mut block, &view, first, SignalSet::ENTROPY, &Numbering::new(&[0]));
        assert_eq!([write(0), write(256), write(512)], [Ok(256), Ok(256), Ok(88)]);
        assert_eq!(word(&block, SLOT + 4 * 87), 599);
        assert_eq!(word(&block, SIGNAL_COLUMNS + 4 * 87), 0x7fc0_0000, "any NaN becomes the canonical one");
        assert_eq!(word(&block, SIGNAL_COLUMNS + COLUMN), u32::MAX, "a column that nobody asked for is not written");
        let short = RouteBatch { slots: &numbers[..599], ..view };
        let error = write_rows(&mut block, &short, 512, SignalSet::NONE, &Numbering::new(&[0]));
        assert_eq!(error, Err(MissingColumn("slots")));
    }
}
