//! The stages of a slice in flight between hosts. Plain data.

/// What the messages in flight of a slice are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExchangeStage {
    /// The data of the folded host.
    Fold,
    /// A round of the handshake.
    Round(usize),
    /// A reverse round of recursive halving.
    Unfold(usize),
    /// The result for the folded host.
    FoldResult,
    /// Parts of the pieces.
    Scatter,
    /// Completed pieces.
    Gather,
    /// Blocks of an all-to-all.
    Blocks,
    /// A round of the ring.
    Ring(usize),
}

/// What follows a stage.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Messages of this stage are in flight.
    ExchangeStage(ExchangeStage),
    /// The hosts' calls match, and no data travelled with the handshake.
    StartData,
    /// The slice is complete, or the hosts' calls differ (false).
    Done(bool),
}
